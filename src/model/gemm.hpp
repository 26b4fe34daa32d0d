// Matrix products of the model outside attention, through OpenBLAS.
#pragma once

#include <cstdint>

namespace mla::model {

/// Rows of one GEMM call. Every product runs in calls of exactly this many rows (the last one
/// padded by its caller), because a BLAS picks its kernels by the matrix sizes: with the row count
/// fixed, the bits of a row depend on that row alone and not on how many rows share the batch.
inline constexpr std::int64_t kRowBlock = 16;

constexpr std::int64_t padded_rows(std::int64_t rows) noexcept {
  return (rows + kRowBlock - 1) / kRowBlock * kRowBlock;
}

/// A matrix operand: element (i, j) at data[i * stride + j].
struct ConstMatrix {
  const float* data = nullptr;
  std::int64_t stride = 0;
};
struct Matrix {
  float* data = nullptr;
  std::int64_t stride = 0;
};

/// y [rows, n] = x [rows, k] * w^T, w [n, k]. rows is a multiple of kRowBlock.
void multiply_transposed(ConstMatrix x, ConstMatrix w, Matrix y, std::int64_t rows, std::int64_t n,
                         std::int64_t k);

/// y [rows, n] = x [rows, k] * w, w [k, n]. rows is a multiple of kRowBlock.
void multiply(ConstMatrix x, ConstMatrix w, Matrix y, std::int64_t rows, std::int64_t n,
              std::int64_t k);

/// Threads of OpenBLAS, process-wide. Its idle threads spin, so one is best for small models.
void set_gemm_threads(int num_threads);

}  // namespace mla::model
