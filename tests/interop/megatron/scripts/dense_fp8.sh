#!/bin/bash
# An 8B decoder in fp8 on one node. Usage: dense_fp8.sh [CHECKPOINTS [BOARD [TOKENIZER [DATA]]]]

export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
saved=${1:-"runs/dense"}
board=${2:-"boards/dense"}
tokenizer=${3:-"MOCK"}
prefix=${4:-"MOCK"}     # MOCK: made-up rows
mkdir -p "$(dirname "$saved")" "$(dirname "$board")"

nodes=1
program="pretrain_gpt.py"
kind="fp8"
length=8192
cache="${PWD}/cache_of_dense"
launch=(--nproc_per_node 8 --nnodes $nodes --node_rank ${NODE_RANK:-0})

network=(
    --num-layers 32
    --hidden-size 4096 --ffn-hidden-size 14336
    --num-attention-heads 32 --group-query-attention --num-query-groups 8 --kv-channels 128
    --seq-length $length
    --max-position-embeddings $length
    --position-embedding-type rope --rotary-base 1000000 --rotary-percent 1.0
    --attention-dropout 0.0 --hidden-dropout 0.0
    --swiglu --normalization RMSNorm
    --init-method-std 0.0134
    --attention-backend fused   # cuDNN
    --apply-layernorm-1p
    --untie-embeddings-and-output-weights --disable-bias-linear
)

updates=(
    --micro-batch-size 1 --global-batch-size 128
    --train-samples 1953125000 --lr-decay-samples 1949218748 --lr-warmup-samples 3906252
    --lr 0.00015 --min-lr 0.00001 --lr-decay-style cosine
    --decoupled-lr 5.0e-4       # of embeddings and head
    --decoupled-min-lr 4.5e-5
    --clip-grad 1.0 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95
    --bf16 --grad-reduce-in-bf16
    --cross-entropy-loss-fusion --calculate-per-token-loss
    --manual-gc --empty-unused-memory-level 1 --exit-duration-in-mins 235
)

numbers=()
if [[ "$kind" == "fp8" ]]; then
    numbers+=(
        "--fp8-format hybrid"
        "--fp8-amax-history-len 1024"
        "--fp8-amax-compute-algo max"
        "--fp8-param-gather"
    )
fi

layout=(
    --tensor-model-parallel-size 1 --context-parallel-size 1
    # --pipeline-model-parallel-size 2
    --sequence-parallel         # off with one tensor device
)
sharding=(--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather)
updates+=("${sharding[@]}")

rows=()
if [[ "$tokenizer" == "MOCK" ]] || [[ "$prefix" == "MOCK" ]] || [[ -z "$tokenizer" ]]; then
    rows+=("--mock-data" "--tokenizer-type NullTokenizer" "--tiktoken-pattern v2")
else
    rows+=("--data-path $prefix" "--tokenizer-type HuggingFaceTokenizer" "--tokenizer-model $tokenizer")
fi
rows+=("--vocab-size 128256" "--data-cache-path ${cache}" "--split '99,1,0'")

if [ ! -f "$program" ]; then
    echo "$program is not in this folder"
    exit 1
fi

torchrun ${launch[@]} \
    "$program" \
    ${network[@]} ${updates[@]} ${numbers[@]} \
    ${layout[@]} ${rows[@]} \
    --log-interval 1 --eval-iters 32 --eval-interval 100 --save-interval 1000 \
    --profile --profile-step-start 4 --profile-step-end 6 --ckpt-format torch_dist \
    --save "$saved" --load "$saved" --tensorboard-dir "$board"

set +x
