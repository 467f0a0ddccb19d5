# Read by job.sh.
: "${CLUSTER:?Set CLUSTER, such as a partition}"
export CLUSTER
: "${TOKENS:?Set TOKENS, a prefix}"
export FLAGS=" ${MORE_FLAGS} \
	--tensor-model-parallel-size ${TENSOR} --pipeline-model-parallel-size ${STAGES} \
	--num-layers ${LAYERS} --hidden-size ${HIDDEN} --num-attention-heads ${HEADS} \
	--micro-batch-size 1 --global-batch-size ${ROWS} --train-iters 500 \
	--data-path ${TOKENS} --vocab-file vocab.json --merge-file merges.txt \
	--seq-length 2048 --max-position-embeddings 2048 --lr 0.0001 --fp16 --loss-scale 8192 "
