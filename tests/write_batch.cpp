// Writes a small batch file for cli_test.sh.
#include <iostream>

#include "io/batch_file.hpp"
#include "testkit/problem_gen.hpp"

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  const auto problem = mla::testkit::parse_case("b=3,sq=1:2:1,h=4,len=5:70:0,page=16,pad=1,sinks=1");
  const auto batch = mla::testkit::make_batch(problem.value());
  if (!batch.ok()) {
    std::cerr << batch.status().message() << '\n';
    return 1;
  }
  const mla::Status written = mla::io::write_batch(argv[1], (*batch)->problem, (*batch)->tensors);
  if (!written.ok()) std::cerr << written.message() << '\n';
  return written.ok() ? 0 : 1;
}
