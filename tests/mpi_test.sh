#!/bin/bash
# Ranks as processes: the group over MPI, and `mla run` as a job. mpi_test.sh <mpirun> <mpi_test> <mla>
# <batch-file writer>
set -u
MPIRUN=$1
TEST=$2
MLA=$3
WRITER=$4
COMPARE=$(cd "$(dirname "$0")" && pwd)/compare_results.py
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT
cd "$WORK" || exit 1
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export OMPI_MCA_rmaps_base_oversubscribe=1 OMPI_MCA_btl_vader_single_copy_mechanism=none
# MPI keeps memory until the process ends, which is no leak of ours.
export ASAN_OPTIONS=${ASAN_OPTIONS:-}:detect_leaks=0
failures=0
problem() { echo "FAILED: $*" >&2; cat out err >&2; failures=$((failures + 1)); }
job() { timeout 120 "$MPIRUN" -n "$@" >out 2>err; }

for world in 1 2 3 5; do
  job $world "$TEST" collectives || problem "collectives of $world ranks"
done
for scenario in farewell late; do
  rm -f passed.*
  job 3 "$TEST" $scenario
  [ -e passed.0 ] && [ -e passed.1 ] && [ -e passed.2 ] || problem "$scenario"
done

"$WRITER" batch.safetensors || problem "the batch writer failed"
"$MLA" run --input batch.safetensors --output whole.safetensors --backend cpu_reference >out 2>err || problem "run"
for world in 1 2 4 7; do
  for strategy in a2a ag_rs; do
    job $world "$MLA" run --input batch.safetensors --output job.safetensors --interleave 3 --threads 1 \
      --strategy $strategy --json || problem "a job of $world, $strategy"
    python3 -c 'import json; assert json.load(open("out"))["ranks"] == '$world || problem "not one report"
    python3 "$COMPARE" whole.safetensors job.safetensors || problem "a job of $world, $strategy differs"
  done
done
job 2 "$MLA" bench --problem b=2,h=4,len=50 || problem "bench in a job"
grep -q 'wrong values: 0 OK' out || problem "bench in a job"
[ "$(grep -c ',mpi,2,' out)" -eq 2 ] || problem "bench in a job: not one line a strategy"
# An error is said once, and nothing is written.
job 3 "$MLA" run --input absent.safetensors --output none.safetensors
[ $? -eq 2 ] || problem "a missing file: not exit code 2"
[ "$(grep -c '^mla run: ' err)" -eq 1 ] || problem "a missing file: not one message"
job 2 "$MLA" run --input batch.safetensors --output none.safetensors --ranks 2 && problem "--ranks in a job"
[ ! -e none.safetensors ] || problem "an error wrote a result"

[ $failures -eq 0 ] && echo "mpi: all good"
exit $((failures > 0))
