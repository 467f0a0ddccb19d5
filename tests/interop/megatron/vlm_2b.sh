#!/bin/bash
# A vision-language model of 2B parameters on one node: images of 336 pixels, the tower as wide as the decoder.

CHECKPOINTS=$1
TENSORBOARD=$2
VOCABULARY=$3
MERGES=$4

LAUNCH="--nproc_per_node 8 --nnodes 1"

MODEL="
    --encoder-num-layers 12
    --decoder-num-layers 24
    --hidden-size 2048
    --num-attention-heads 16
    --group-query-attention
    --num-query-groups 8
    --position-embedding-type rope
    --rotary-base 500000
    --seq-length 576
    --dataloader-seq-length 1024
    --max-position-embeddings 4096
    --img-h 336
    --img-w 336
    --patch-dim 14
    --disable-vision-class-token
    --attention-dropout 0
    --hidden-dropout 0
    --init-method-std 0.014
    --transformer-impl transformer_engine
"
TRAINING="
    --micro-batch-size 4
    --global-batch-size 128
    --train-iters 2000
    --lr 1e-3
    --lr-decay-style cosine
    --min-lr 2e-5
    --lr-warmup-fraction .03
    --weight-decay 1e-2
    --clip-grad 1.0
    --bf16
    --recompute-activations
    --freeze-LM
    --freeze-ViT
"
LAYOUT="--tensor-model-parallel-size 4 --sequence-parallel --use-distributed-optimizer --use-packed-sequence"
DATA="
    --mock-data
    --vocab-file $VOCABULARY
    --merge-file $MERGES
    --split 949,50,1
"
OUTPUT="--log-interval 10 --tensorboard-dir $TENSORBOARD --eval-interval 1000 --eval-iters 10 --save-interval 500 \
    --save $CHECKPOINTS --ckpt-format torch"

torchrun $LAUNCH pretrain_vlm.py $MODEL $TRAINING $LAYOUT $DATA $OUTPUT
