#!/bin/sh
# The README's C++ block compiles as it stands.  readme_test.sh COMPILER SOURCE_DIR
set -eu
program=$(mktemp --suffix=.cpp)
trap 'rm -f "$program"' EXIT
awk '/^```cpp$/ { inside = 1; next } /^```$/ { inside = 0 } inside' "$2/README.md" > "$program"
[ -s "$program" ] || { echo "README.md: no cpp block" >&2; exit 1; }
"$1" -std=c++17 -Wall -Wextra -Werror -fsyntax-only -I "$2/include" "$program"
