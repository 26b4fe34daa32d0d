#include "model/gemm.hpp"

#include <cblas.h>

#include <algorithm>
#include <array>

namespace mla::model {
namespace {

// Output columns of one call: a block of results is small enough for the stack and the first cache.
constexpr std::int64_t kColumns = 256;

struct Product {
  ConstMatrix x;
  CBLAS_TRANSPOSE w_order;
  ConstMatrix w;
  Matrix y;
  std::int64_t n;
  std::int64_t k;
};

/// Rows row .. row + kRowBlock - 1 of kColumns columns. The result is computed column-major, rows
/// next to each other, and transposed.
void multiply_block(const Product& product, std::int64_t row, std::int64_t column) {
  std::array<float, static_cast<std::size_t>(kRowBlock * kColumns)> block;
  const std::int64_t columns = std::min(kColumns, product.n - column);
  const ConstMatrix& w = product.w;
  const float* w_part = w.data + (product.w_order == CblasNoTrans ? column * w.stride : column);
  cblas_sgemm(CblasColMajor, CblasTrans, product.w_order, static_cast<blasint>(kRowBlock),
              static_cast<blasint>(columns), static_cast<blasint>(product.k), 1.0F,
              product.x.data + row * product.x.stride, static_cast<blasint>(product.x.stride),
              w_part, static_cast<blasint>(w.stride), 0.0F, block.data(),
              static_cast<blasint>(kRowBlock));
  for (std::int64_t i = 0; i < kRowBlock; ++i) {
    float* to = product.y.data + (row + i) * product.y.stride + column;
    for (std::int64_t j = 0; j < columns; ++j) {
      to[j] = block[static_cast<std::size_t>(j * kRowBlock + i)];
    }
  }
}

void multiply_blocks(const Product& product, std::int64_t rows, int num_threads) {
  const std::int64_t panels = (product.n + kColumns - 1) / kColumns;
  const std::int64_t blocks = rows / kRowBlock * panels;
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_threads > 1)
  for (std::int64_t block = 0; block < blocks; ++block) {
    multiply_block(product, block / panels * kRowBlock, block % panels * kColumns);
  }
}

}  // namespace

Gemm::Gemm(int num_threads) : num_threads_(num_threads) {
  openblas_set_num_threads(1);
}

// A row-major w [n, k] is a column-major [k, n], and the other way round.
void Gemm::multiply_transposed(ConstMatrix x, ConstMatrix w, Matrix y, std::int64_t rows,
                               std::int64_t n, std::int64_t k) const {
  multiply_blocks({x, CblasNoTrans, w, y, n, k}, rows, num_threads_);
}

void Gemm::multiply(ConstMatrix x, ConstMatrix w, Matrix y, std::int64_t rows, std::int64_t n,
                    std::int64_t k) const {
  multiply_blocks({x, CblasTrans, w, y, n, k}, rows, num_threads_);
}

}  // namespace mla::model
