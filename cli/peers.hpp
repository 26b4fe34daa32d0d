// What other kernels take for the shapes of `mla bench --suite h200`, and what the chip allows.
// The data is docs/benchmarks/peers-h200.json, which also says how it was measured; it is part of
// the program.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "mla/problem.hpp"
#include "mla/status.hpp"

namespace mla::cli {

/// Which cards a kernel is written for: rivals of the sm90 row, and of the rows for any card.
enum class PeerCards { kHopper, kAny };

struct Peer {
  std::string name;  ///< empty: none
  double us = 0.0;   ///< microseconds of one call
  PeerCards cards = PeerCards::kHopper;
  bool e4m3 = false;  ///< its cache is e4m3; else bf16
};

struct PeerShape {
  std::string name;
  std::string problem;    ///< problem string
  double limit_us = 0.0;  ///< as recorded; `PeerTable::limit_us` gives it for any problem
  std::vector<Peer> peers;

  /// The fastest peer for such cards with this cache. None for fp8_ds_mla; f16 counts as bf16.
  Peer best_peer(KvFormat format, PeerCards cards) const;
};

struct PeerTable {
  std::string device;
  std::vector<PeerShape> shapes;
  std::vector<std::pair<double, double>> read_limit;  ///< bytes, microseconds; both ascend
  double flops_16bit = 0.0;                           ///< sustained, per microsecond
  double flops_8bit = 0.0;

  /// The chip's own limit in microseconds: the larger of reading `bytes` once, interpolated in the
  /// logarithms, and of the arithmetic. `eight_bit`: q and cache are both e4m3.
  double limit_us(double bytes, double flops, bool eight_bit) const;
};

/// kInvalidArgument: not such a table.
Result<PeerTable> parse_peers(std::string_view json);
/// The table that is part of the program.
Result<PeerTable> h200_peers();

}  // namespace mla::cli
