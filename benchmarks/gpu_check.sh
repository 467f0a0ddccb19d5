#!/usr/bin/env bash
# All speed measurements and the tests that want a GPU, on one GPU, in calls of ten minutes; the most telling ones first.
#
#   benchmarks/gpu_check.sh                       the first list of parts, within 570 s
#   PARTS=second benchmarks/gpu_check.sh          the second; likewise third, more, layers, first,second and all
#   LIST=1 benchmarks/gpu_check.sh                print all parts with their time limits, run nothing
#   ONLY='fp8|peers' PARTS=all benchmarks/gpu_check.sh     parts whose names match
#   BUDGET=1500 benchmarks/gpu_check.sh           seconds for everything; parts that do not fit are left out
#   PYTHON=.venv/bin/python TORCH_PYTHON=/path/to/python benchmarks/gpu_check.sh     default: python3 for both
#   COMMIT=1a2b3c4 benchmarks/gpu_check.sh        what results say, on a copy of the tree without its history
#   TINY=1 benchmarks/gpu_check.sh                every part at tiny sizes on CPU; without a GPU anyway
#
# Each part has a time limit (benchmarks/gpu_parts.py). Results are written after each part, so that an end by force
# leaves what there is: gpu_check.json with every part's figures, exit code and seconds, gpu_check.log, and a profiler
# trace, into the folder $OUT, or benchmarks/results where that is not set (tiny figures: the folder for temporary files).
# At the end what was measured stands beside what the planner predicted (benchmarks/predictions.json). Ends with 1 if a
# part failed. Another list than the first adds to the gpu_check.json that is there. Python packages beyond those of the
# machine can lie anywhere on PYTHONPATH.
set -uo pipefail
root="$(cd "$(dirname "$0")/.." && pwd)"
cd "$root"
if [ -z "${OUT:-}" ]; then
    OUT="$root/benchmarks/results"
    # Toy figures are no results.
    if [ "${TINY:-0}" = 1 ] || ! nvidia-smi -L >/dev/null 2>&1; then
        OUT="${TMPDIR:-/tmp}/megajax_gpu_check_tiny"
    fi
fi
export OUT
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
if [ "${LIST:-0}" = 1 ]; then
    exec "${PYTHON:-python3}" benchmarks/gpu_check.py
fi
mkdir -p "$OUT"
[ "${PARTS:-first}${ONLY:-}" = first ] && rm -f "$OUT/gpu_check.log"
"${PYTHON:-python3}" benchmarks/gpu_check.py 2>&1 | tee -a "$OUT/gpu_check.log"
