// `mla plan`: the splits of a batch as a table, a balance summary and a picture.
#include <algorithm>
#include <cstring>
#include <iomanip>
#include <iostream>
#include <memory>
#include <span>

#include "cli.hpp"
#include "core/diagnostics.hpp"
#include "io/batch_file.hpp"
#include "io/output_file.hpp"
#include "mla/decode.hpp"
#include "plan_svg.hpp"
#include "testkit/case.hpp"

namespace mla::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kCommand = "plan";
constexpr std::size_t kTableLines = 200;  // --json has them all

struct Options {
  std::string problem;
  std::string input;
  std::string svg;
  BackendFlags backend;
  bool json = false;
};

struct Planned {
  PlanPicture picture;
  std::size_t workspace_bytes = 0;
};

Result<Planned> make_splits(const DecodeProblem& problem, const PlanOptions& options,
                            const std::string& title, const std::int32_t* seq_lens,
                            const std::int32_t* query_start_loc, const std::int32_t* global_lens) {
  const Result<DecodePlan> made = plan(problem, options);
  if (!made.ok()) return made.status();
  Result<std::vector<Split>> made_splits = splits(*made, seq_lens, query_start_loc, global_lens);
  if (!made_splits.ok()) return made_splits.status();
  Planned planned;
  planned.picture = {title, made->backend_name(), made->num_workers(), std::move(*made_splits)};
  planned.workspace_bytes = made->workspace_bytes();
  return planned;
}

Result<Planned> plan_problem(const Options& options) {
  const Result<testkit::Case> parsed = testkit::parse_case(options.problem);
  if (!parsed.ok()) return parsed.status();
  const testkit::CaseLengths lengths = testkit::case_lengths(*parsed);
  const auto narrow = [](const std::vector<std::int64_t>& values) {
    return std::vector<std::int32_t>(values.begin(), values.end());
  };
  // The 32-bit arrays of a batch hold what the problem's own limits allow.
  for (std::int64_t length : lengths.global_lens) {
    if (length > std::numeric_limits<std::int32_t>::max()) {
      return bad_argument(kCommand, "len", length, "a 32-bit length");
    }
  }
  const std::vector<std::int32_t> seq_lens = narrow(lengths.seq_lens);
  const std::vector<std::int32_t> global_lens = narrow(lengths.global_lens);
  return make_splits(testkit::decode_problem(*parsed, lengths),
                     testkit::plan_options(*parsed, options.backend.options()), testkit::to_string(*parsed),
                     parsed->k > 0 ? nullptr : seq_lens.data(),
                     testkit::gives_query_start_loc(*parsed) ? lengths.query_start_loc.data() : nullptr,
                     parsed->cp_world > 1 ? global_lens.data() : nullptr);
}

/// The integers of a batch's array, checked for shape; empty when it is not given.
Result<std::vector<std::int32_t>> read_integers(const char* name, const TensorView& view,
                                                std::int64_t count) {
  std::vector<std::int32_t> values;
  if (!view.given()) return values;
  if (view.dtype != DType::kI32 || view.rank != 1 || view.shape[0] != count) {
    return bad_argument(kCommand, text(name, " shape"), view.rank == 1 ? text('[', view.shape[0], ']') : "another rank",
                        text('[', count, ']'));
  }
  values.resize(static_cast<std::size_t>(count));
  if (count > 0) std::memcpy(values.data(), view.data, values.size() * sizeof(std::int32_t));
  return values;
}

Result<Planned> plan_file(const Options& options) {
  const Result<io::Batch> batch = io::read_batch(options.input);
  if (!batch.ok()) return batch.status();
  const DecodeProblem& problem = batch->problem;
  const DecodeTensors& tensors = batch->tensors;
  const auto seq_lens = read_integers("seq_lens", problem.sparse() ? TensorView{} : tensors.seq_lens,
                                      problem.num_requests);
  if (!seq_lens.ok()) return seq_lens.status();
  const auto starts = read_integers("query_start_loc", tensors.query_start_loc, problem.num_requests + 1);
  if (!starts.ok()) return starts.status();
  const auto global_lens =
      read_integers("causal_seqlens_kv_global", tensors.causal_seqlens_kv_global, problem.num_requests);
  if (!global_lens.ok()) return global_lens.status();
  const auto data = [](const std::vector<std::int32_t>& values) {
    return values.empty() ? nullptr : values.data();
  };
  return make_splits(problem, options.backend.options(), to_string(problem), data(*seq_lens),
                     data(*starts), data(*global_lens));
}

struct Balance {
  double total = 0.0;
  double mean = 0.0;
  double largest = 0.0;
  int idle = 0;
  std::size_t num_partials = 0;  ///< splits whose results are merged

  explicit Balance(const PlanPicture& picture) {
    const std::vector<double> work = picture.work_by_worker();
    for (double w : work) {
      total += w;
      largest = std::max(largest, w);
      if (w == 0.0) ++idle;
    }
    mean = total / static_cast<double>(work.size());
    for (const Split& split : picture.splits) num_partials += split.partial >= 0 ? 1 : 0;
  }
  double efficiency() const { return largest > 0 ? mean / largest : 1.0; }
};

void print_table(const Planned& planned) {
  const PlanPicture& picture = planned.picture;
  const Balance balance(picture);
  std::cout << picture.title << "\nbackend " << picture.backend << ", " << picture.num_workers
            << " workers, " << picture.splits.size() << " splits (" << balance.num_partials
            << " merged), workspace " << planned.workspace_bytes << " bytes\n\n"
            << "worker  request          rows                  keys    share of work\n";
  std::size_t lines = 0;
  for (const Split& split : picture.splits) {
    if (lines++ == kTableLines) break;
    const auto range = [](std::int64_t begin, std::int64_t end) {
      return begin < end ? text(begin, "..", end - 1) : std::string("none");
    };
    const double share = balance.total > 0 ? 100 * PlanPicture::work(split) / balance.total : 0.0;
    std::cout << std::right << std::setw(6) << split.worker << "  " << std::setw(7) << split.request << "  "
              << std::setw(12) << range(split.row_begin, split.row_end) << "  " << std::setw(20)
              << range(split.key_begin, split.key_end) << "  " << std::setw(14) << std::fixed
              << std::setprecision(2) << share << "%\n";
  }
  if (picture.splits.size() > kTableLines) {
    std::cout << "... " << picture.splits.size() - kTableLines << " more splits (--json prints all)\n";
  }
  std::cout << "\nbalance: the busiest worker does " << std::fixed << std::setprecision(1)
            << (balance.mean > 0 ? 100 * balance.largest / balance.mean : 100.0)
            << "% of the mean, " << balance.idle << " of " << picture.num_workers << " workers idle\n";
}

Json to_json(const Planned& planned) {
  const PlanPicture& picture = planned.picture;
  const Balance balance(picture);
  Json rows = Json::array();
  for (const Split& split : picture.splits) {
    rows.push_back({{"worker", split.worker},
                    {"request", split.request},
                    {"row_begin", split.row_begin},
                    {"row_end", split.row_end},
                    {"key_begin", split.key_begin},
                    {"key_end", split.key_end},
                    {"partial", split.partial},
                    {"work_share", balance.total > 0 ? PlanPicture::work(split) / balance.total : 0.0}});
  }
  return {{"problem", picture.title},       {"backend", picture.backend},
          {"workers", picture.num_workers}, {"workspace_bytes", planned.workspace_bytes},
          {"merged_splits", balance.num_partials}, {"idle_workers", balance.idle},
          {"efficiency", balance.efficiency()},    {"splits", rows}};
}

Status write_text(const std::string& path, const std::string& content) {
  Result<io::OutputFile> file = io::OutputFile::create(kCommand, path);
  if (!file.ok()) return file.status();
  MLA_RETURN_IF_ERROR(file->write(std::as_bytes(std::span(content))));
  return file->commit();
}

int run_plan(const Options& options) {
  const Result<Planned> planned = options.input.empty() ? plan_problem(options) : plan_file(options);
  if (!planned.ok()) return fail(kCommand, planned.status());
  if (!options.svg.empty()) {
    const Status written = write_text(options.svg, plan_svg(planned->picture));
    if (!written.ok()) return fail(kCommand, written);
  }
  if (options.json) print_json(to_json(*planned));
  else print_table(*planned);
  return kExitDone;
}

}  // namespace

void add_plan_command(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand("plan", "Show how a batch is split among workers");
  CLI::Option_group* source = command->add_option_group("batch");
  source->add_option("--problem", options->problem, "Problem string (keys: mla info --help)")
      ->type_name("STR");
  source->add_option("--input", options->input, "Batch file (safetensors)")->type_name("FILE");
  source->require_option(1);
  command->add_option("--svg", options->svg, "Write a picture: who reads which keys")->type_name("FILE");
  add_backend_flags(*command, options->backend, "Row of `mla info` (default: the first that runs)");
  command->add_flag("--json", options->json, "Print JSON");
  command->footer(example("mla plan --problem b=8,h=128,len=100..4000 --threads 8 --svg plan.svg"));
  command->callback([options, &exit_code] { exit_code = run_plan(*options); });
}

}  // namespace mla::cli
