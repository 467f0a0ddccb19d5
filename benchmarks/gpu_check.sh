#!/usr/bin/env bash
# All speed measurements and GPU tests on one GPU, in calls of ten minutes; the most important ones first.
#
#   benchmarks/gpu_check.sh                       the first list of parts, within 570 s
#   PARTS=second benchmarks/gpu_check.sh          the second list; also third, more, layers, recurrences, recipes, first,second, all
#   LIST=1 benchmarks/gpu_check.sh                print all parts with their time limits, run nothing
#   ONLY='fp8|8192' PARTS=all benchmarks/gpu_check.sh      parts whose names match
#   BUDGET=1500 benchmarks/gpu_check.sh           total seconds; parts that do not fit are skipped
#   PYTHON=.venv/bin/python benchmarks/gpu_check.sh        default: python3
#   COMMIT=1a2b3c4 benchmarks/gpu_check.sh        commit in the results, for a copy of the tree without history
#   TINY=1 benchmarks/gpu_check.sh                every part at tiny sizes on CPU; the default without a GPU
#
# Each part has a time limit (benchmarks/gpu/steps.py). Results are written after each part, so they survive a kill:
# gpu_check.json with every part's figures, exit code and seconds, gpu_check.log, and a profiler trace. The folder is
# $OUT, by default benchmarks/results (tiny sizes: the folder for temporary files). At the end, measured figures are
# printed with the planner's predictions (benchmarks/predictions.json). The exit code is 1 if a part failed. Lists
# other than the first add to an existing gpu_check.json. Python packages may be anywhere on PYTHONPATH.
set -uo pipefail
root="$(cd "$(dirname "$0")/.." && pwd)"
cd "$root"
if [ -z "${OUT:-}" ]; then
    OUT="$root/benchmarks/results"
    # Figures of tiny sizes are not results.
    if [ "${TINY:-0}" = 1 ] || ! nvidia-smi -L >/dev/null 2>&1; then
        OUT="${TMPDIR:-/tmp}/megajax_gpu_check_tiny"
    fi
fi
export OUT
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
if [ "${LIST:-0}" = 1 ]; then
    exec "${PYTHON:-python3}" -m benchmarks gpu_check
fi
mkdir -p "$OUT"
[ "${PARTS:-first}${ONLY:-}" = first ] && rm -f "$OUT/gpu_check.log"
"${PYTHON:-python3}" -m benchmarks gpu_check 2>&1 | tee -a "$OUT/gpu_check.log"
