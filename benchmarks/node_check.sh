#!/usr/bin/env bash
# Checks a node with whole training runs on several layouts, compared with one device.
#
#   benchmarks/node_check.sh                          all checks; on the GPUs of this machine, or 8 virtual CPU devices
#   benchmarks/node_check.sh --only=pipeline          names that contain it: layouts, experts, everything, stop, speed-data
#   benchmarks/node_check.sh --processes=8            only with one process per device
#   PYTHON=.venv/bin/python OUT=/tmp/out benchmarks/node_check.sh      default: python3, a folder for temporary files
#
# Prints a line for each check, and speeds beside predictions (benchmarks/predictions.json). Writes
# $OUT/node_check.json and node_check.log; runs are kept below $OUT/runs. benchmarks/gpu/node_check.py describes the
# checks. The exit code is 1 if one failed.
set -uo pipefail
root="$(cd "$(dirname "$0")/.." && pwd)"
cd "$root"
export OUT="${OUT:-${TMPDIR:-/tmp}/megajax_node_check}"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
mkdir -p "$OUT"
"${PYTHON:-python3}" -m benchmarks node_check "--json=$OUT/node_check.json" "$@" 2>&1 | tee "$OUT/node_check.log"
