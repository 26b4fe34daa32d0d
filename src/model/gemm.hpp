// Matrix products of the model outside attention, through OpenBLAS.
#pragma once

#include <cstdint>

namespace mla::model {

/// Rows of one GEMM call. Every product runs in calls of exactly this many rows (the last one
/// padded by its caller) that lie along the vector lanes of the BLAS kernel. Lanes run the same
/// instructions, so the bits of a row depend neither on how many rows share the batch nor on its
/// place among them. (Along the other axis they do: OpenBLAS's Haswell kernel sums groups of
/// columns differently.)
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

class Gemm {
 public:
  /// Sets OpenBLAS to one thread, process-wide: its idle threads spin and it would cut the rows of
  /// a block. Threads share the blocks and columns of a product here instead, in parts that do not
  /// depend on their number.
  explicit Gemm(int num_threads);

  /// y [rows, n] = x [rows, k] * w^T, w [n, k]. rows is a multiple of kRowBlock.
  void multiply_transposed(ConstMatrix x, ConstMatrix w, Matrix y, std::int64_t rows,
                           std::int64_t n, std::int64_t k) const;

  /// y [rows, n] = x [rows, k] * w, w [k, n]. rows is a multiple of kRowBlock.
  void multiply(ConstMatrix x, ConstMatrix w, Matrix y, std::int64_t rows, std::int64_t n,
                std::int64_t k) const;

 private:
  int num_threads_;
};

}  // namespace mla::model
