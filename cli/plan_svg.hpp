// The picture of a plan: which worker reads which keys of which request, and how even the work is.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "mla/decode.hpp"

namespace mla::cli {

/// A plan with the splits of one batch.
struct PlanPicture {
  std::string title;             ///< for example the problem string
  std::string backend;
  int num_workers = 1;
  std::vector<Split> splits;

  /// Row-keys of a split: the unit of work that the summary and the picture count.
  static double work(const Split& split) noexcept {
    return static_cast<double>(split.key_end - split.key_begin) *
           static_cast<double>(split.row_end - split.row_begin);
  }
  std::vector<double> work_by_worker() const;
};

/// A complete SVG document. x: key position; y: one lane per row block of a request; colour: worker.
std::string plan_svg(const PlanPicture& picture);

}  // namespace mla::cli
