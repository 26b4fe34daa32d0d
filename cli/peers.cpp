#include "peers.hpp"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "core/diagnostics.hpp"
#include "peers_data.hpp"

namespace mla::cli {
namespace {

using Json = nlohmann::json;

// Columns of a row: name, problem, limit, and the peers in this order.
struct PeerColumn {
  const char* name;
  PeerCards cards;
  bool e4m3;
};
constexpr PeerColumn kPeerColumns[] = {{"flashmla", PeerCards::kHopper, false},
                                       {"flashinfer", PeerCards::kHopper, false},
                                       {"fa3", PeerCards::kHopper, false},
                                       {"flashmla", PeerCards::kHopper, true},
                                       {"flashinfer", PeerCards::kHopper, true},
                                       {"fa2", PeerCards::kAny, false},
                                       {"fa2", PeerCards::kAny, true}};
constexpr std::size_t kFirstPeer = 3;
constexpr std::size_t kColumns = kFirstPeer + std::size(kPeerColumns);
constexpr double kMegabyte = 1e6;
constexpr double kTeraPerMicro = 1e6;  // TFLOP/s in FLOP/us

PeerShape parse_shape(const Json& row) {
  if (row.size() != kColumns) {
    throw std::invalid_argument(text("a shape of ", row.size(), " columns"));
  }
  PeerShape shape;
  shape.name = row[0].get<std::string>();
  shape.problem = row[1].get<std::string>();
  shape.limit_us = row[2].get<double>();
  for (std::size_t i = 0; i < std::size(kPeerColumns); ++i) {
    const Json& us = row[kFirstPeer + i];
    const PeerColumn& column = kPeerColumns[i];
    if (!us.is_null()) {
      shape.peers.push_back({column.name, us.get<double>(), column.cards, column.e4m3});
    }
  }
  return shape;
}

}  // namespace

Peer PeerShape::best_peer(KvFormat format, PeerCards cards) const {
  Peer best;
  if (format == KvFormat::kFp8DsMla) return best;
  for (const Peer& peer : peers) {
    if (peer.cards != cards || peer.e4m3 != (format == KvFormat::kE4M3)) continue;
    if (best.name.empty() || peer.us < best.us) best = peer;
  }
  return best;
}

double PeerTable::limit_us(double bytes, double flops, bool eight_bit) const {
  const double arithmetic = flops / (eight_bit ? flops_8bit : flops_16bit);
  const auto above =
      std::lower_bound(read_limit.begin(), read_limit.end(), bytes,
                       [](const auto& point, double value) { return point.first < value; });
  double reading = 0.0;
  if (above == read_limit.begin()) {
    reading = above->second;
  } else if (above == read_limit.end()) {
    reading = read_limit.back().second * bytes / read_limit.back().first;
  } else {
    const auto& below = *(above - 1);
    const double exponent =
        std::log(above->second / below.second) / std::log(above->first / below.first);
    reading = below.second * std::pow(bytes / below.first, exponent);
  }
  return std::max(reading, arithmetic);
}

Result<PeerTable> parse_peers(std::string_view json) {
  try {
    const Json root = Json::parse(json);
    PeerTable table;
    table.device = root.at("device").get<std::string>();
    table.flops_16bit = root.at("tflops_16bit").get<double>() * kTeraPerMicro;
    table.flops_8bit = root.at("tflops_8bit").get<double>() * kTeraPerMicro;
    const Json& sizes = root.at("read_megabytes");
    const Json& times = root.at("read_us");
    if (sizes.empty() || sizes.size() != times.size())
      throw std::invalid_argument("a time for each size");
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      table.read_limit.emplace_back(sizes[i].get<double>() * kMegabyte, times[i].get<double>());
    }
    for (const Json& row : root.at("shapes")) table.shapes.push_back(parse_shape(row));
    return table;
  } catch (const std::exception& error) {
    return bad_argument("bench", "table of peers", error.what(),
                        text("the ", kColumns, " columns of peers-h200.json"));
  }
}

Result<PeerTable> h200_peers() {
  return parse_peers(kPeersH200);
}

}  // namespace mla::cli
