#!/bin/bash
# Sizes of a study, sent to a queue. Everything can be set from outside.
set -euo pipefail

PYTHON=${PYTHON:-python}
MODE=${MODE:-weak}
STAGES=2
case "${MODE}" in
    weak|strong) ;;
    *) exit 1 ;;
esac
TENSOR=$((64/STAGES/8))
LAYERS=${LAYERS:-32}; HIDDEN=20480; HEADS=128
ROWS=${ROWS:-}
ROWS=${ROWS:-$((STAGES * 16))}
MORE_FLAGS="--recompute-activations "
if (( TENSOR > 1 )); then
    MORE_FLAGS+="--sequence-parallel"
fi
if (( ROWS % STAGES != 0 )); then
    echo "ROWS has to be a multiple of STAGES"
    exit 1
fi
export NAME=study_${MODE}_${STAGES}

. `dirname $0`/sizes.sh

submit() {
    local name=$1
    shift
    local log="${PWD}/logs/${name}.log"
    mkdir -p "$(dirname "$log")" || {
        echo "no folder for logs"
        exit 1
    }
    sbatch --job-name="$name" <<EOF
#!/bin/bash
#SBATCH --nodes=8
srun --mpi=pmix \
    bash -x -c "cd code; $PYTHON pretrain_gpt.py ${FLAGS} $@" 2>&1 | tee ${log%.log}-\${SLURM_JOB_ID}.log
EOF
}

cut_layers() {
    [ "$1" = strong ] && return
    echo "$LAYERS"
}

submit ${NAME} --num-virtual-stages-per-pipeline-rank $(( $(cut_layers $MODE) / STAGES / 4 ))
exit 0
