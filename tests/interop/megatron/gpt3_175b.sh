#!/bin/bash
# GPT-3 175B: tensor 8, pipeline 16. Usage: gpt3_175b.sh CHECKPOINTS TENSORBOARD VOCABULARY MERGES DATA

export CUDA_DEVICE_MAX_CONNECTIONS=1

PER_NODE=8
NODES=${SLURM_NNODES:-16}
PORT=6000
ALL=$((PER_NODE * NODES))

CHECKPOINTS=$1       # a folder
BOARD="$2"
VOCABULARY=$3
MERGES=${4}
DATA=$5              # a prefix

LAUNCH=( --nproc_per_node $PER_NODE --nnodes $NODES
         --master_port "$PORT" )

NETWORK=(
    --num-layers 96
    --hidden-size 12288     # 96 heads of 128
    --num-attention-heads 96
    --seq-length 2048
    --max-position-embeddings 2048
    --attention-backend auto
    --init-method-std 0.006
)

UPDATES=(
    --micro-batch-size 1 --global-batch-size 1536
    --rampup-batch-size 16 16 5859375
    --train-iters 500000
    --adam-beta1 0.9 --adam-beta2 0.95
    --weight-decay 0.1 --clip-grad 1.0
    --fp16
)

RATE=" --lr 6.0e-5 --min-lr 6.0e-6 \
  --lr-decay-style cosine --lr-warmup-fraction .001"
RATE+=" --lr-decay-iters 430000"

LAYOUT=(--tensor-model-parallel-size 8 --pipeline-model-parallel-size 16)

INPUT=(
    --data-path "$DATA"
    --vocab-file "$VOCABULARY"
    --merge-file "$MERGES"
    --split 949,50,1
)

WATCH=(
    --log-interval 100 --eval-iters 10 --eval-interval 1000
    --save "$CHECKPOINTS" --load "$CHECKPOINTS" --save-interval 10000
    --tensorboard-dir "$BOARD"
)

torchrun ${LAUNCH[@]} pretrain_gpt.py \
    "${NETWORK[@]}" ${UPDATES[@]} \
    $RATE \
    "${LAYOUT[@]}" "${INPUT[@]}" \
    ${WATCH[@]} 2>&1 | tee train.log
