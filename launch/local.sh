#!/usr/bin/env bash
# Train on one machine, one process for each GPU: launch/local.sh CONFIG [--setting=value ...]
#   PROCESSES      processes to start; unset: one for each GPU, and one where there is none
#   LOG_DIR        a folder for a file of output from each process; unset: all output goes to the terminal
#   MAX_RESTARTS   restarts after failures that may not repeat themselves; default 3
set -euo pipefail

config=${1:?usage: launch/local.sh CONFIG [--setting=value ...]}
shift
gpus=$(find /dev -maxdepth 1 -name 'nvidia[0-9]*' 2>/dev/null | wc -l)
processes=${PROCESSES:-$((gpus > 0 ? gpus : 1))}

exec python -m megajax.launch --processes="$processes" --max-restarts="${MAX_RESTARTS:-3}" \
    ${LOG_DIR:+--log-dir="$LOG_DIR"} -- \
    python -m megajax.train --config="$config" "$@"
