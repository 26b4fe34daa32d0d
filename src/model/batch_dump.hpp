// BatchDump: writes the attention call of one layer and decode step as a batch file.
#pragma once

#include <cstdint>
#include <string>

#include "model/generate.hpp"

namespace mla::model {

/// The file holds the query, the cache pages the requests own (placed in the layer's own pool),
/// table, lengths and scales: `mla run` and `mla check` take it as input. Padding rows are left
/// out.
class BatchDump {
 public:
  BatchDump(std::string path, std::int64_t layer, std::int64_t decode_step)
      : path_(std::move(path)), layer_(layer), decode_step_(decode_step) {}

  /// A GenerateOptions::hook that writes the file when its step comes. The object must outlive it.
  StepHook hook();

  /// Ok once the file is written; kInvalidArgument when its step or layer never came; else why it
  /// could not be written.
  Status status() const;

 private:
  void write(const DecodeProblem& problem, const DecodeTensors& tensors);

  std::string path_;
  std::int64_t layer_;
  std::int64_t decode_step_;
  bool reached_ = false;
  Status status_;
};

}  // namespace mla::model
