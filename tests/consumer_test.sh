#!/bin/sh
# Installs a build into a temporary prefix and builds and runs the consumer project against it.
#   consumer_test.sh <cmake> <build folder> <consumer folder> <source folder, or "installed"> <C> <C++> [flags]
# With a source folder the consumer uses add_subdirectory; it is then configured, not built.
set -eu
cmake=$1 build=$2 consumer=$3 source=$4 cc=$5 cxx=$6
shift 6
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

if [ "$source" != installed ]; then
  "$cmake" -S "$consumer" -B "$work/build" -DMLA_SUBDIRECTORY="$source" -DMLA_CUDA=OFF \
    -DCMAKE_C_COMPILER="$cc" -DCMAKE_CXX_COMPILER="$cxx" -DCMAKE_EXPORT_COMPILE_COMMANDS=ON
  # As a part of another project the library brings neither its tests nor its command.
  if grep -q 'tests/decode_test.cpp\|cli/main.cpp' "$work/build/compile_commands.json"; then
    echo "consumer_test: the tests or the command are built inside another project" >&2
    exit 1
  fi
  exit 0
fi

"$cmake" --install "$build" --prefix "$work/prefix"
"$cmake" -S "$consumer" -B "$work/build" -DCMAKE_PREFIX_PATH="$work/prefix" -DCMAKE_BUILD_TYPE=Release \
  -DCMAKE_C_COMPILER="$cc" -DCMAKE_CXX_COMPILER="$cxx" "-DCMAKE_EXE_LINKER_FLAGS=$*"
"$cmake" --build "$work/build"
"$work/build/consumer_cxx"
"$work/build/consumer_c"
if [ -x "$work/build/consumer_mpi" ]; then
  # MPI keeps memory until the process ends.
  ASAN_OPTIONS="${ASAN_OPTIONS:-}:detect_leaks=0" OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 \
    "$work/build/consumer_mpi"
fi
# Only the public headers are installed, and every one compiles on its own; mpi.hpp needs mpi.h, and
# the consumer above compiled it.
for header in "$work"/prefix/include/mla/*.hpp; do
  [ "$(basename "$header")" = mpi.hpp ] && continue
  echo "#include \"mla/$(basename "$header")\"" > "$work/one.cpp"
  "$cxx" -std=c++17 -Wall -Wextra -Wpedantic -Wshadow -Werror -fsyntax-only -I"$work/prefix/include" "$work/one.cpp"
done
echo '#include "mla/mla.h"' > "$work/one.c"
"$cc" -std=c99 -Wall -Wextra -pedantic -Werror -fsyntax-only -I"$work/prefix/include" "$work/one.c"
