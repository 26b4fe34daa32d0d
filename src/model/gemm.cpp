#include "model/gemm.hpp"

#include <cblas.h>

namespace mla::model {
namespace {

void multiply_blocks(CBLAS_TRANSPOSE w_order, ConstMatrix x, ConstMatrix w, Matrix y,
                     std::int64_t rows, std::int64_t n, std::int64_t k) {
  for (std::int64_t row = 0; row < rows; row += kRowBlock) {
    cblas_sgemm(CblasRowMajor, CblasNoTrans, w_order, static_cast<blasint>(kRowBlock),
                static_cast<blasint>(n), static_cast<blasint>(k), 1.0F, x.data + row * x.stride,
                static_cast<blasint>(x.stride), w.data, static_cast<blasint>(w.stride), 0.0F,
                y.data + row * y.stride, static_cast<blasint>(y.stride));
  }
}

}  // namespace

void multiply_transposed(ConstMatrix x, ConstMatrix w, Matrix y, std::int64_t rows, std::int64_t n,
                         std::int64_t k) {
  multiply_blocks(CblasTrans, x, w, y, rows, n, k);
}

void multiply(ConstMatrix x, ConstMatrix w, Matrix y, std::int64_t rows, std::int64_t n,
              std::int64_t k) {
  multiply_blocks(CblasNoTrans, x, w, y, rows, n, k);
}

void set_gemm_threads(int num_threads) {
  openblas_set_num_threads(num_threads);
}

}  // namespace mla::model
