#include "model/batch_dump.hpp"

#include "core/diagnostics.hpp"
#include "io/batch_file.hpp"

namespace mla::model {

StepHook BatchDump::hook() {
  return [this](std::int64_t decode_step, std::int64_t layer, const DecodeProblem& problem,
                const DecodeTensors& tensors) {
    if (decode_step == decode_step_ && layer == layer_) write(problem, tensors);
  };
}

void BatchDump::write(const DecodeProblem& problem, const DecodeTensors& tensors) {
  reached_ = true;
  const auto* query_start_loc = static_cast<const std::int32_t*>(tensors.query_start_loc.data);
  DecodeProblem trimmed = problem;
  trimmed.num_tokens = query_start_loc[problem.num_requests];
  DecodeTensors inputs = tensors;
  inputs.q.shape[0] = trimmed.num_tokens;
  inputs.out = TensorView();
  io::BatchWriteOptions options;
  options.only_owned_pages = true;
  status_ = io::write_batch(path_, trimmed, inputs, options);
}

Status BatchDump::status() const {
  if (reached_) return status_;
  return bad_argument("generate", "dump_batch",
                      text("no decode step ", decode_step_, " of layer ", layer_),
                      "a layer and a decode step of this run, both counted from 0");
}

}  // namespace mla::model
