#!/usr/bin/env bash
# Train on one machine, one process for each visible GPU: launch/local.sh CONFIG [--setting=value ...]
# Any other command in such processes:                    launch/local.sh -- python -m benchmarks mfu --config=CONFIG
#   PROCESSES      processes to start; unset: one for each visible GPU, and one where there is none
#   LOG_DIR        a folder for a file of output from each process; unset: all output goes to the terminal
#   MAX_RESTARTS   restarts after failures that may not repeat themselves; default 3
set -euo pipefail

config=${1:?usage: launch/local.sh CONFIG [--setting=value ...], or -- COMMAND ...}
shift
command=(python -m megajax.train --config="$config")
[[ $config == -- ]] && command=()
processes=${PROCESSES:-$(python -m megajax.processes.gpus)}

exec python -m megajax.launch --processes="$processes" --max-restarts="${MAX_RESTARTS:-3}" \
    ${LOG_DIR:+--log-dir="$LOG_DIR"} -- \
    "${command[@]}" "$@"
