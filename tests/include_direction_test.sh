#!/bin/sh
# Include direction: include <- src/core <- src/cpu, src/cuda, src/capi <- src/io, src/model, src/testkit
# <- cli, tests. A folder sees what is to its left, and never its neighbours' inside.
#   include_direction_test.sh <source folder>
set -eu
cd "$1"
failed=0

# Every project include of the files of a folder, as "file:included".
includes_of() {
  find "$1" -type f \( -name '*.hpp' -o -name '*.cpp' -o -name '*.h' -o -name '*.c' -o -name '*.cu' -o -name '*.cuh' \) \
    -exec grep -HoE '^ *#include "[^"]+"' {} + | sed 's/: *#include "/:/; s/"$//'
}

# check <folder> <regex of what it may include>
check() {
  [ -d "$1" ] || return 0
  bad=$(includes_of "$1" | grep -vE ":($2)" || true)
  if [ -n "$bad" ]; then
    printf 'include_direction_test: %s includes what it must not see:\n%s\n' "$1" "$bad" >&2
    failed=1
  fi
}

public='mla/[a-z_]+\.(h|hpp)$'
check include "$public"
check src/core "$public|core/"
check src/cpu "$public|core/|cpu/"
check src/distributed "$public|mpi\.h$|core/|distributed/"
# The public interface alone: the C interface must not need more than a C++ user has.
check src/capi "$public"
check src/io "$public|core/|io/"
check src/model "$public|core/|io/|model/"
check src/testkit "$public|core/|cpu/reference\.hpp$|cuda/cuda\.hpp$|io/|testkit/"
check src/cuda "$public|core/|cuda/"
check src/cuda/sm90 "$public|core/|cuda/sm90/|cuda/[a-z_0-9]+\.(hpp|cuh|h)$"
check src/cuda/portable "$public|core/|cuda/portable/|cuda/[a-z_0-9]+\.(hpp|cuh|h)$"
# The command reaches backends through the table, never directly; its bench times a device.
check cli "$public|core/|cuda/cuda\.hpp$|io/|model/|testkit/|distributed/agreement\.hpp$|[a-z_]+\.(hpp|h)$|cli/"

# src/core names a backend only in the registry, which asks each for its rows.
bad=$(grep -RnE 'namespace (cpu|cuda)|cpu::|cuda::' src/core include | grep -vE 'src/core/(registry\.cpp|backend\.hpp):' || true)
if [ -n "$bad" ]; then
  printf 'include_direction_test: src/core knows a backend:\n%s\n' "$bad" >&2
  failed=1
fi

# Kernels of one instruction set do not include those of another.
bad=$(includes_of src/cpu | grep -E ':cpu/(bf16_|amx_)' | grep -E '^src/cpu/(highway_|lanes|few_rows|softmax-inl|convert-inl)' || true)
bad="$bad$(includes_of src/cpu | grep -E ':cpu/[a-z_]+-inl\.h' | grep -E '^src/cpu/(avx512bf16|amx|bf16)' || true)"
bad="$bad$(includes_of src/cpu | grep -E ':.*(\.cpp$|_kernels\.)' || true)"
if [ -n "$bad" ]; then
  printf 'include_direction_test: kernels include each other:\n%s\n' "$bad" >&2
  failed=1
fi

# Public headers: C++17 and no third party (but for the header that is about one); nothing but the standard library in <>.
bad=$(grep -RnE '#include <(omp|hwy|cuda|nlohmann|CLI|gtest|mpi)' include | grep -v '^include/mla/mpi.hpp:' || true)
if [ -n "$bad" ]; then
  printf 'include_direction_test: a public header needs another library:\n%s\n' "$bad" >&2
  failed=1
fi
exit $failed
