#!/bin/bash
# Experts, windows and learned sinks, in fp8. The arguments are flags of this script.

SAVED="UNSET"
BOARD="./boards/"
TOKENIZER="MOCK"
DATA="MOCK"
NODES_FILE=""
while [[ $# -gt 0 ]]; do
    case $1 in
        --saved)      SAVED="$2"; shift 2 ;;
        --board)      BOARD="$2"; shift 2 ;;
        --tokenizer)  TOKENIZER="$2"; shift 2 ;;
        --data)
            DATA="$2"
            shift 2
            ;;
        --nodes-file) NODES_FILE="$2"; shift 2 ;;
        -h|--help)
            echo "Usage: $0 [flags]"
            exit 0
            ;;
        *)
            echo "unknown flag: $1"
            exit 1
            ;;
    esac
done

if [ ! -d "$SAVED" ]; then
    echo "no such folder: $SAVED"
    exit 1
fi
if [ ! -d "$BOARD" ]; then
    echo "making $BOARD"
    mkdir -p "$BOARD"
fi

PER_NODE=8
NODES=1
if [ -n "$NODES_FILE" ]; then
    if [ ! -f "$NODES_FILE" ]; then
        echo "no such file: $NODES_FILE"
    else
        source "$NODES_FILE"
    fi
fi
PER_NODE=${PER_NODE:-8}
WORLD=$(($PER_NODE*$NODES))

LENGTH=8192
SAMPLES=1953125000
NETWORK=(
    --num-layers 12 --hidden-size 512 --ffn-hidden-size 2048
    --num-attention-heads 64 --group-query-attention --num-query-groups 8
    --seq-length ${LENGTH} --max-position-embeddings ${LENGTH}
    --position-embedding-type rope --rope-type rope --rotary-base 10000 --rotary-percent 1.0
    --normalization RMSNorm --untie-embeddings-and-output-weights --disable-bias-linear
    --quick-geglu --glu-linear-offset 1.0 --activation-func-clamp-value 7.0
    --softmax-type learnable --window-size 128,0 --window-attn-skip-freq 2
    --no-bias-gelu-fusion --no-bias-dropout-fusion --no-rope-fusion --no-masked-softmax-fusion
    --export-force-local-attention --enable-gpt-oss
)
EXPERTS=(
    --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 2048
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3 --moe-z-loss-coeff 1e-3
    --moe-router-dtype fp32 --moe-token-dispatcher-type alltoall --moe-grouped-gemm --moe-permute-fusion
)
ROWS=()
if [[ "$TOKENIZER" == "MOCK" ]] || [[ "$DATA" == "MOCK" ]]; then
    ROWS+=("--mock-data" "--tokenizer-type NullTokenizer" "--vocab-size 128256")
else
    ROWS+=("--data-path $DATA" "--tokenizer-type HuggingFaceTokenizer" "--tokenizer-model $TOKENIZER")
fi
UPDATES=(
    --micro-batch-size 1 --global-batch-size 128 --train-samples ${SAMPLES} --lr-decay-samples $((SAMPLES - 3906252))
    --lr 1.0e-5 --min-lr 1.0e-6 --lr-decay-style cosine --lr-warmup-fraction 0.05
    --weight-decay 0.1 --clip-grad 1.0 --bf16 --recompute-activations
    --attention-softmax-in-fp32 --accumulate-allreduce-grads-in-fp32
    --use-distributed-optimizer --overlap-param-gather --overlap-grad-reduce
    --fp8-format hybrid --fp8-param-gather --fp8-amax-compute-algo max --fp8-amax-history-len 1024
)

python -m torch.distributed.run --nproc_per_node $PER_NODE --nnodes $NODES pretrain_gpt.py \
    ${NETWORK[@]} ${EXPERTS[@]} ${ROWS[@]} ${UPDATES[@]} \
    --save $SAVED --save-interval 10000 --eval-iters 0 --no-load-optim --no-load-rng --moe-per-layer-logging
