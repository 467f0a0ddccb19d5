#!/bin/bash
# BERT of 340M parameters on one node, with Megatron-LM's names and sizes.

export CUDA_DEVICE_MAX_CONNECTIONS=1
NODES=1
GPUS=8

CHECKPOINTS=$1
VOCABULARY=$2
CORPUS=$3

LAUNCH=(--nproc_per_node $GPUS --nnodes $NODES --master_addr localhost --master_port 6000)

MODEL=(
    --num-layers 24
    --hidden-size 1024
    --num-attention-heads 16
    --seq-length 512
    --max-position-embeddings 512
    --attention-backend auto
)
TRAINING=(
    --micro-batch-size 4
    --global-batch-size 32
    --train-iters 1000000
    --lr 0.0001
    --lr-decay-iters 990000
    --lr-decay-style linear
    --lr-warmup-fraction .01
    --min-lr 1.0e-5
    --weight-decay 1e-2
    --clip-grad 1.0
    --fp16
)
LAYOUT=(--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2)
DATA=(
    --data-path $CORPUS
    --vocab-file $VOCABULARY
    --tokenizer-type BertWordPieceLowerCase
    --vocab-size 30524
    --split 949,50,1
    --mask-prob 0.2
    --short-seq-prob 0.05
)
OUTPUT=(
    --log-interval 100
    --save-interval 10000
    --eval-interval 1000
    --eval-iters 10
    --save $CHECKPOINTS
    --load $CHECKPOINTS
)

torchrun ${LAUNCH[@]} pretrain_bert.py ${MODEL[@]} ${TRAINING[@]} ${LAYOUT[@]} ${DATA[@]} ${OUTPUT[@]}
