#!/bin/bash
# Mamba-2 with attention and MLPs. Usage: hybrid.sh DATA TOKENIZER

SIZE="800M" # or 8B
case "${SIZE}" in
    "800M") TENSOR=1; LAYERS=48; HIDDEN=1024; HEADS=16; ROWS=32 ;;
    "8B")
        TENSOR=4
        LAYERS=56
        HIDDEN=4096
        HEADS=32
        ROWS=8
        ;;
    *)
        echo "unknown size"
        exit 1
        ;;
esac
DATA=$1
TOKENIZER=$2
LENGTH=4096
for FOLDER in ./saved ./board ./cache; do
    mkdir -p ${FOLDER}
done

flags=" \
    --num-layers ${LAYERS} --hidden-size ${HIDDEN} --num-attention-heads ${HEADS} \
    --group-query-attention --num-query-groups 8 \
    --hybrid-attention-ratio 0.08 --hybrid-mlp-ratio 0.5 \
    --spec megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec \
    --seq-length ${LENGTH} --max-position-embeddings ${LENGTH} --position-embedding-type none \
    --normalization RMSNorm --untie-embeddings-and-output-weights --disable-bias-linear \
    --attention-dropout 0.0 --hidden-dropout 0.0 --init-method-std 0.02 \
    --tensor-model-parallel-size ${TENSOR} --sequence-parallel --pipeline-model-parallel-size 1 \
    --use-distributed-optimizer --overlap-param-gather --overlap-grad-reduce \
    --micro-batch-size 4 --global-batch-size ${ROWS} \
    --train-samples 73242188 --lr-warmup-samples 50000 --lr-decay-samples 73192188 \
    --lr 2.5e-4 --min-lr 2.5e-5 --lr-decay-style cosine --weight-decay 0.1 --clip-grad 1.0 --bf16 \
    --save ./saved --load ./saved --save-interval 2000 --eval-interval 2000 --eval-iters 32 \
    --data-path ${DATA} --data-cache-path ./cache --split 99,1,0 \
    --tokenizer-type GPTSentencePieceTokenizer --tokenizer-model ${TOKENIZER} \
    --tensorboard-dir ./board"

torchrun --nproc_per_node 8 ../../pretrain_mamba.py ${flags}
