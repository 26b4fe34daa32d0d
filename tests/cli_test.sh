#!/bin/bash
# The mla command from outside: each command, its exit codes, where messages go, and that an error leaves
# no output behind. Usage: cli_test.sh <mla> <batch-file writer>
set -u
MLA=$1
WRITER=$2
COMPARE=$(cd "$(dirname "$0")" && pwd)/compare_results.py
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT
cd "$WORK" || exit 1
failures=0

problem() { echo "FAILED: $*" >&2; failures=$((failures + 1)); }

# expect <exit code> <command...>: runs with stdout and stderr in files out and err.
expect() {
  local code=$1
  shift
  "$MLA" "$@" >out 2>err
  local found=$?
  [ "$found" -eq "$code" ] || { problem "mla $*: exit code $found, expected $code"; cat err >&2; }
}
# holds <file> <text>: the text is in the file.
holds() { grep -qF -- "$2" "$1" || { problem "'$2' is not in $1:"; head -5 "$1" >&2; }; }
empty() { [ ! -s "$1" ] || { problem "$1 is not empty:"; head -5 "$1" >&2; }; }
absent() { [ ! -e "$1" ] || problem "$1 exists"; }
json() { python3 -c 'import json,sys; json.load(open(sys.argv[1]))' "$1" || problem "$1 is not JSON"; }

# Help: every command ends with an example of itself.
for command in info run plan check bench generate; do
  expect 0 $command --help
  holds out "Example:"
  holds out "mla $command"
  holds out "--json"
  empty err
done
# The examples that need no file run as they stand.
for command in info plan check; do
  expect 0 $command --help
  line=$(grep '^  mla ' out | tail -1)
  expect 0 ${line#*mla }
done
expect 0 --version
expect 0 --help
holds out "Exit codes"

# Usage errors: code 2, message on stderr, nothing on stdout.
for arguments in "" "nonsense" "check" "check --suite" "check --suite nothing" "check --problem b=1 --suite smoke" \
  "check --problem b=1,x=2" "check --problem l=17" "check --random 0" "check --problem b=1 --threads 0" \
  "check --problem b=1 --backend nothing" "check --problem b=1 --seed 3" "check -p b=1" \
  "plan" "plan --problem b=1,len=x" "bench" "bench --problem b=1 --format xml" "bench --suite gpu" \
  "bench --suite h200 --filter zzz" "bench --suite cpu --filter zzz" "bench --filter b=1" \
  "bench --problem b=1 --filter b=1" "bench --suite h200 --problem b=1" "bench --problem b=1,x=2" \
  "bench --suite h200 --backend cpu_avx2" "bench --suite h200 --backend nothing" "bench --suite h200 --backend all" \
  "bench --problem b=1 --backend nothing" "bench --problem b=1 --page-size 0" "bench --suite h200 --cache f32" \
  "run" "run --input a" "info --problem kv=x" "plan --input absent.safetensors"; do
  expect 2 $arguments
  empty out
  [ -s err ] || problem "mla $arguments: no message"
done
expect 2 check --problem b=1,x=2
holds err "'x'"

# info
expect 0 info
holds out "cpu_reference"
holds out "runs"
holds out "cuda"
expect 0 info --problem b=4,h=128,len=4096
holds out "chosen"
expect 0 info --json
json out

# check
expect 0 check --problem b=2,h=4,len=3:70 --backend cpu_reference
holds out "ok    cpu_reference"
[ "$(tail -1 out)" = "1 passed, 0 failed" ] || problem "check: last line is $(tail -1 out)"
empty err
expect 0 check --random 3 --seed 9 --backend all
expect 0 check --problem b=1,h=2,len=9 --problem b=2,h=1,len=0:5 --json
json out
expect 0 check --suite smoke
[ "$(tail -1 out)" = "35 passed, 0 failed" ] || problem "check: last line is $(tail -1 out)"

# 3: a valid request that no row serves here.
unserved=$("$MLA" info | awk '$1 ~ /^cpu_/ && $3 == "no:" { print $1; exit }')
if [ -n "$unserved" ]; then
  expect 3 check --problem b=1,h=4,len=9 --backend "$unserved"
  empty out
  holds err "$unserved"
fi

# plan
expect 0 plan --problem b=3,h=16,len=100:3000:7 --threads 4 --svg plan.svg
holds out "share of work"
holds out "balance"
holds plan.svg "</svg>"
python3 -c 'import xml.dom.minidom as m; m.parse("plan.svg")' || problem "plan.svg is not XML"
expect 0 plan --problem b=2,h=16,len=50,k=20 --json
json out
expect 2 plan --problem b=1,len=9 --svg absent/plan.svg
empty out

# bench
expect 0 bench --problem b=1,h=4,len=64 --min-time 0.01
[ "$(tail -1 out)" = "wrong values: 0 OK" ] || problem "bench: last line is $(tail -1 out)"
expect 0 bench --problem b=1,h=4,len=64 --min-time 0.01 --json
json out
expect 0 bench --problem b=1,h=4,len=64 --min-time 0.01 --format csv
holds out "gflops"
expect 0 bench --problem b=1,h=4,len=64 --page-size 16 --cache f16 --min-time 0.01
holds out "b=1,h=4,len=64,page=16,q=f16,kv=f16"

# bench: without a GPU, built for one or not, one sentence says why none is timed.
if ! "$MLA" info | awk '$2 == "cuda" && $3 == "runs" { found = 1 } END { exit !found }'; then
  for arguments in "--suite h200" "--suite h200 --json" "--suite h200 --backend sm90" "--suite h200 --filter _h128_" \
    "--problem b=1 --backend sm90" "--problem b=1 --backend sm90 --format csv"; do
    expect 3 bench $arguments
    empty out
    holds err "mla bench: "
    holds err "CUDA"
    [ "$(wc -l <err)" -eq 1 ] || problem "bench $arguments: more than one line"
  done
  # Bad input is bad input here too.
  expect 2 bench --problem b=1,x=2 --backend sm90
  expect 3 check --problem b=1 --backend sm90
  empty out
fi

# run: a file in, a file out; what check and plan make of the same file.
"$WRITER" batch.safetensors || problem "the batch writer failed"
expect 0 run --input batch.safetensors --output result.safetensors
[ -s result.safetensors ] || problem "run: no result"
expect 0 run --input batch.safetensors --output again.safetensors --backend cpu_reference --threads 1 --json
json out
# The same on a group of ranks, whatever their number: more ranks than tokens or heads too.
for ranks in 1 2 4 7 16; do
  for strategy in auto a2a ag_rs; do
    expect 0 run --input batch.safetensors --output sharded.safetensors --ranks $ranks --interleave 3 \
      --strategy $strategy --json
    json out
    python3 "$COMPARE" again.safetensors sharded.safetensors || problem "run --ranks $ranks $strategy differs"
  done
done
expect 0 bench --problem b=2,h=4,len=50 --ranks 2
holds out "wrong values: 0 OK"
expect 2 bench --suite cpu --ranks 2
expect 2 run --input batch.safetensors --output none.safetensors --ranks 0
expect 2 run --input batch.safetensors --output none.safetensors --ranks 2 --interleave 0
expect 2 run --input batch.safetensors --output none.safetensors --ranks 2 --strategy nccl
absent none.safetensors
expect 0 check --input batch.safetensors --backend all
expect 0 plan --input batch.safetensors

# run: errors write nothing and leave an old result alone.
head -c 100 batch.safetensors >truncated.safetensors
head -c $(($(stat -c %s batch.safetensors) - 1)) batch.safetensors >short.safetensors
printf '\377\377\377\377\377\377\377\177{}' >hostile.safetensors
: >empty.safetensors
for file in truncated short hostile empty absent; do
  expect 2 run --input $file.safetensors --output none.safetensors
  holds err "$file.safetensors"
  empty out
  absent none.safetensors
done
cp result.safetensors kept.safetensors
expect 2 run --input truncated.safetensors --output kept.safetensors
cmp -s result.safetensors kept.safetensors || problem "run: an error changed an old result"
expect 2 run --input batch.safetensors --output none.safetensors --backend nothing
absent none.safetensors
expect 2 run --input batch.safetensors --output absent/none.safetensors
if [ -n "$unserved" ]; then
  expect 3 run --input batch.safetensors --output none.safetensors --backend "$unserved"
  absent none.safetensors
fi
[ -z "$(find . -name '*none*')" ] || problem "run: left something behind: $(find . -name '*none*')"

# A full disk is an error too.
if [ -w /dev/full ]; then
  "$MLA" info >/dev/full 2>err
  [ $? -eq 2 ] || problem "info > /dev/full: not an error"
fi

[ $failures -eq 0 ] && echo "cli: all good"
exit $((failures > 0))
