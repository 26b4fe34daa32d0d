// The `mla` program: parse, dispatch, exit code.
#include <exception>
#include <iostream>
#include <new>

#include "cli.hpp"
#include "mla/decode.hpp"

int main(int argc, char** argv) {
  using namespace mla::cli;
  CLI::App app{"Decode attention for models with multi-head latent attention (MLA)", "mla"};
  app.set_help_flag("--help", "Show this help");
  app.set_version_flag("--version", std::string(mla::version()));
  app.require_subcommand(1);
  app.footer(
      "Exit codes: 0 done, 1 a check failed, 2 bad usage or bad input, 3 not supported here.\n" +
      example("mla check --suite smoke"));

  int exit_code = kExitDone;
  try {
    add_info_command(app, exit_code);
    add_run_command(app, exit_code);
    add_plan_command(app, exit_code);
    add_check_command(app, exit_code);
    add_bench_command(app, exit_code);
    add_generate_command(app, exit_code);
    app.parse(argc, argv);
    std::cout.flush();
    if (!std::cout) return fail("output", kExitBadInput, "stdout: cannot be written");
    return exit_code;
  } catch (const CLI::Success& request) {  // --help, --version
    app.exit(request);
    return kExitDone;
  } catch (const CLI::ParseError& error) {
    std::cerr << "mla: " << error.what() << "\nRun mla --help or mla <command> --help.\n";
    return kExitBadInput;
  } catch (const std::bad_alloc&) {
    std::cerr << "mla: out of memory\n";
    return kExitBadInput;
  } catch (const std::exception& error) {
    std::cerr << "mla: " << error.what() << '\n';
    return kExitBadInput;
  }
}
