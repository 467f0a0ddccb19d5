#!/bin/bash
# T5 of 220M parameters on one node, with Megatron-LM's names and sizes.

CHECKPOINTS=$1
TENSORBOARD=$2
VOCABULARY=$3
CORPUS=$4

LAUNCH="--nproc_per_node 8 --nnodes 1"

MODEL="
    --encoder-num-layers 12
    --decoder-num-layers 10
    --hidden-size 768
    --num-attention-heads 12
    --kv-channels 64
    --ffn-hidden-size 3072
    --encoder-seq-length 512
    --decoder-seq-length 128
    --max-position-embeddings 512
    --transformer-impl transformer_engine
    --use-mcore-models
"
TRAINING="
    --micro-batch-size 64
    --global-batch-size 512
    --lr 0.0001
    --train-iters 1000000
    --lr-decay-iters 1000000
    --lr-decay-style linear
    --min-lr 0.00001
    --weight-decay 1e-2
    --lr-warmup-fraction .01
    --clip-grad 1.0
    --bf16
    --tensor-model-parallel-size 4
    --sequence-parallel
    --use-distributed-optimizer
"
DATA="
    --data-path $CORPUS
    --vocab-file $VOCABULARY
    --tokenizer-type BertWordPieceCase
    --vocab-size 29098
    --split 99982,9,9
    --vocab-extra-ids 100
"
OUTPUT="--log-interval 100 --tensorboard-dir $TENSORBOARD --save-interval 500 --eval-interval 1000 --eval-iters 10 \
    --save $CHECKPOINTS"

torchrun $LAUNCH pretrain_t5.py $MODEL $TRAINING $DATA $OUTPUT
