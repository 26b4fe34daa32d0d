#!/bin/sh
# Every test that docs/faults-covered.md names exists, and every test named after a fault is listed.
#   faults_covered_test.sh <source folder>
set -eu
cd "$1"
defined=$(sed -n 's/^TEST\(_P\)\{0,1\}(\([A-Za-z]*\), \([A-Za-z0-9_]*\)).*/\2.\3/p' tests/*_test.cpp | sort -u)
listed=$(grep -oE '`[A-Z][A-Za-z]*\.[A-Za-z0-9_]+`' docs/faults-covered.md | tr -d '`' | sort -u)
failed=0
for name in $listed; do
  printf '%s\n' "$defined" | grep -qx "$name" || { echo "listed, but no test: $name" >&2; failed=1; }
done
for name in $(printf '%s\n' "$defined" | grep -E '\.B[0-9]+_'); do
  printf '%s\n' "$listed" | grep -qx "$name" || { echo "a test, but not listed: $name" >&2; failed=1; }
done
exit $failed
