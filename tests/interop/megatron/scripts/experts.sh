#!/bin/bash
# A mixture of 8 experts on 32 GPUs. Usage: experts.sh CHECKPOINTS TOKENIZER DATA

PER_NODE=8
NODES=${SLURM_NNODES:-"4"}
RANKS=$(($PER_NODE*$NODES))
SAVED=$1
TOKENIZER=$2
DATA=$3
PIPELINE=4

fail() {
    echo "error: $1" >&2
    exit 1
}
(( RANKS % PIPELINE == 0 )) || fail "$RANKS ranks are not a multiple of $PIPELINE"

NETWORK=(
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
    --group-query-attention --num-query-groups 8
    --seq-length 4096 --max-position-embeddings 32768
    --normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
    --position-embedding-type rope --no-position-embedding --rotary-base 1000000
    --init-method-std 0.01 --attention-dropout 0.0 --hidden-dropout 0.0
    --no-masked-softmax-fusion
)
EXPERTS=(
    --num-experts 8 --moe-router-topk 2
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2
    --moe-grouped-gemm --moe-token-dispatcher-type alltoall
    --overlap-param-gather --overlap-grad-reduce
)
UPDATES=(
    --micro-batch-size 1 --global-batch-size 256 --train-iters 500000
    --lr 1e-4 --min-lr 1.0e-5 --lr-decay-style cosine --lr-decay-iters 320000 --lr-warmup-iters 500
    --weight-decay 0.1 --clip-grad 1.0 --bf16
)
LAYOUT=(
    --tensor-model-parallel-size 1
    --pipeline-model-parallel-size $PIPELINE
    --expert-model-parallel-size 8
    --use-distributed-optimizer --sequence-parallel
)
WATCH=(
    --log-interval 1 \
    --eval-interval 1000 --eval-iters 10 \
    --save $SAVED --load $SAVED --save-interval 10000 \
    --tensorboard-dir "${SAVED}/board" \
    --no-load-optim \
    --no-load-rng
)
if [ -n "${WANDB_API_KEY}" ]; then
    WATCH+=(
        --wandb-project ${WANDB_PROJECT:-"Mixture"}
        --wandb-exp-name ${WANDB_NAME:-"mixture_8x7b"}
    )
fi

torchrun --nproc_per_node $PER_NODE --nnodes $NODES pretrain_gpt.py \
    ${NETWORK[@]} ${EXPERTS[@]} ${UPDATES[@]} ${LAYOUT[@]} ${WATCH[@]} \
    --tokenizer-type Llama2Tokenizer --tokenizer-model ${TOKENIZER} --data-path $DATA --split 99990,8,2
