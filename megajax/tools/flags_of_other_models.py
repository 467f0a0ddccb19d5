"""Megatron-LM's flags about models, objectives and services that this version does not have: one answer a group."""

from megajax.tools.flags import Flag, flags, needless, refused
from megajax.tools.flags_of_models import NO_EXPERTS, NO_STATE_SPACE, NO_T5, NO_VISION
from megajax.tools.flags_of_operations import GENERATION

NO_RETRIEVAL = "retrieval models (Retro, REALM, ICT) are not in this version: train the decoder without them"
NO_LINEAR = "linear, sparse and other experimental attention is not in this version: see docs/models.md"
NO_HYPER_CONNECTIONS = "hyper-connections are not in this version: each layer has one residual stream"
NO_REINFORCEMENT = "reinforcement learning is not in this version: it trains on token files"
NO_DISTILLATION = "training on another model's logits is not in this version: the targets are tokens"
PLAIN_PREDICTION = "heads that predict further are blocks of their own: model.prediction"

MORE_EXPERTS: tuple[Flag, ...] = flags(
    refused(NO_EXPERTS),
    """
    moe-apply-probs-on-input moe-combine-bwd-dtype moe-deepep-num-sms moe-dispatch-fwd-dtype moe-enable-routing-replay
    moe-expert-rank-capacity-factor moe-flex-dispatcher-num-sms moe-hybridep-num-blocks-permute
    moe-hybridep-num-blocks-unpermute moe-hybridep-num-sms moe-hybridep-num-sms-preprocessing
    moe-hybridep-pad-uneven-dispatch-inputs moe-layer-recompute moe-mlp-glu-interleave-size moe-ncclep-zero-copy
    moe-pad-experts-for-cuda-graph-inference moe-paged-stash moe-paged-stash-buffer-size-factor-cpu
    moe-paged-stash-buffer-size-factor-cuda moe-paged-stash-page-size moe-permute-fusion-into-hybridep
    moe-router-force-biased moe-router-padding-for-fp8 moe-router-padding-for-quantization
    moe-router-quantile-balancing-ema moe-router-topk-limited-devices moe-routing-trace-capture-hidden-states
    moe-routing-trace-capture-logits moe-routing-trace-dump-weights moe-routing-trace-max-training-iters
    moe-routing-trace-path moe-shared-expert-glu-interleave-size moe-single-grouped-bias moe-single-grouped-weight
    moe-token-dropping moe-upcycling-granularity moe-use-grouped-tensor use-grouped-gemm-for-shared-expert
    overlap-dispatch-backward-with-experts-wgrad ep-overlap-early-attn-memory-release high-priority-a2a-comm-stream
    expert-gtp-weight-remat-size expert-tensor-parallel-num-weight-shards gtp-expert-remat-nccl-ub
    save-tokens-per-expert-interval
    """,
)

OTHER_BLOCKS: tuple[Flag, ...] = (
    *flags(
        refused(NO_STATE_SPACE),
        """
        mamba-inference-conv-states-dtype mamba-inference-ssm-states-dtype mamba-training-ssm-states-dtype
        use-mamba-mem-eff-path mtp-hybrid-override-pattern
        """,
    ),
    *flags(
        refused(NO_LINEAR),
        """
        experimental-attention-variant experimental-attention-variant-loss-scale-func linear-attention-freq
        linear-conv-kernel-dim linear-key-head-dim linear-num-key-heads linear-num-value-heads linear-value-head-dim
        gdp-cutedsl-kernel gdp-num-chunk-states-to-recompute gdp-num-householder
        dsa-indexer-head-dim dsa-indexer-k-norm-epsilon dsa-indexer-k-norm-fp32 dsa-indexer-loss-coeff
        dsa-indexer-n-heads dsa-indexer-rope-interleaved dsa-indexer-rotate-activation dsa-indexer-scoring-relu
        dsa-indexer-skip-topk-offset dsa-indexer-topk dsa-indexer-topk-freq dsa-indexer-use-sparse-loss
        dsa-kernel-backend
        """,
    ),
    *flags(
        refused(NO_HYPER_CONNECTIONS),
        """
        enable-mhc-connections mhc-init-gating-factor mhc-num-residual-streams mhc-recompute-layer-num
        mhc-sinkhorn-iterations
        """,
    ),
    *flags(refused(PLAIN_PREDICTION), "mtp-detach-heads mtp-hsm mtp-standalone mtp-use-repeated-layer"),
)

OTHER_MODELS: tuple[Flag, ...] = (
    *flags(
        refused(NO_RETRIEVAL),
        """
        retro-project-dir retro-add-retriever retro-cyclic-train-iters retro-encoder-layers
        retro-encoder-hidden-dropout retro-encoder-attention-dropout retro-num-neighbors retro-num-retrieved-chunks
        retro-attention-gate retro-no-verify-neighbor-count
        bert-load biencoder-projection-dim biencoder-shared-query-context-model block-data-path embedding-path
        evidence-data-path ict-head-size ict-load indexer-batch-size indexer-log-interval query-in-block-prob
        retriever-report-topk-accuracies retriever-score-scaling titles-data-path use-one-sent-docs
        """,
    ),
    *flags(refused(NO_T5), "bert-embedder-type output-bert-embeddings"),
    *flags(
        refused(NO_VISION),
        """
        vision-pretraining vision-pretraining-type vision-backbone-type swin-backbone-type
        dino-bottleneck-size dino-freeze-last-layer dino-head-hidden-size dino-local-crops-number dino-local-img-size
        dino-norm-last-layer dino-teacher-temp dino-warmup-teacher-temp dino-warmup-teacher-temp-epochs
        classes-fraction data-per-class-fraction no-data-sharding head-lr-mult iter-per-epoch mask-factor mask-type
        num-channels num-classes patch-dim
        """,
    ),
)

OTHER_OBJECTIVES: tuple[Flag, ...] = (
    *flags(
        refused(NO_REINFORCEMENT),
        """
        perform-rl-step langrl-env-config refit-method use-same-sampling-seed-across-dp-ranks
        offset-sampling-seed-by-dp-rank
        grpo-clamp-eps-lower grpo-clamp-eps-upper grpo-entropy-term-weight grpo-filter-groups-with-same-reward
        grpo-group-size grpo-iterations grpo-kl-beta grpo-prompts-per-step
        rl-consumption-granularity rl-default-temperature rl-default-top-k rl-default-top-p rl-durable-rollout-bank
        rl-generation-lag rl-importance-sampling-truncation-coef rl-inference-expert-model-parallel-size
        rl-inference-expert-tensor-model-parallel-size rl-inference-logprobs-is-correction
        rl-inference-model-unified-memory-level rl-inference-parsers rl-inference-pipeline-model-parallel-size
        rl-inference-tensor-model-parallel-size rl-kv-cache-management-mode rl-max-inflight-requests
        rl-offload-inference-model-weights-when-idle rl-offload-optimizer-during-inference rl-partial-rollouts
        rl-persist-cuda-graphs rl-profile rl-profile-dir rl-prompts-per-eval rl-rollout-bank-dir
        rl-rollout-bank-max-bytes rl-sequence-packing-algo rl-sequence-packing-max-sequences-per-bin
        rl-skip-bos-token rl-submission-granularity rl-training-cuda-graphs rl-use-sequence-packing
        rl-verify-model-weights-swap
        """,
    ),
    *flags(
        refused(NO_DISTILLATION),
        """
        logits-load-decode-threads logits-load-dir logits-load-ignore-errors logits-load-kd-loss-alpha
        logits-load-msc-prefetch-depth logits-load-prefetch-factor logits-save-dir logits-save-dtype logits-save-top-k
        logits-save-top-p logits-save-top-p-min-k
        """,
    ),
    *flags(
        refused("fill-in-the-middle is not in this version"),
        """
        fim-eod-token fim-fragment-rate fim-middle-token fim-no-prefix fim-pad-token fim-prefix-token fim-suffix-token
        """,
    ),
    *flags(refused("all weights are trained: leave it out"), "freeze-all-layers"),
)

MORE_INFERENCE: tuple[Flag, ...] = flags(
    needless(GENERATION),
    """
    cache-mla-latents decode-only-cuda-graphs enable-chunked-prefill flash-decode inference-batch-times-seqlen-threshold
    inference-coordinator-port inference-cuda-graph-all-prefills inference-cuda-graph-max-tokens
    inference-cuda-graph-scope inference-disable-ep-consensus inference-disable-triton-nvls-kernels
    inference-dynamic-batching inference-dynamic-batching-async-sched-mode
    inference-dynamic-batching-cuda-graph-mixed-prefill-count
    inference-dynamic-batching-cuda-graph-sizing-distribution inference-dynamic-batching-enable-prefix-caching
    inference-dynamic-batching-logprobs-mode inference-dynamic-batching-mamba-memory-ratio
    inference-dynamic-batching-num-cuda-graphs inference-dynamic-batching-paused-buffer-size-gb
    inference-dynamic-batching-prefix-caching inference-dynamic-batching-prefix-caching-coordinator-policy
    inference-dynamic-batching-prefix-caching-eviction-policy inference-dynamic-batching-prefix-caching-mamba-gb
    inference-dynamic-batching-prefix-caching-routing-alpha inference-dynamic-batching-sampling-backend
    inference-dynamic-batching-track-generated-token-events inference-dynamic-batching-track-paused-request-events
    inference-dynamic-batching-unified-memory-level inference-fuse-tp-communication inference-grouped-gemm-backend
    inference-logging-step-interval inference-moe-disable-fused-quant-kernels inference-moe-token-dispatcher-type
    inference-rng-tracker inference-sampling-seed inference-shards inference-text-gen-server-logging
    inference-use-synchronous-zmq-collectives inference-wandb-logging max-tokens-to-oom mlp-chunks-for-prefill
    nccl-all-reduce-for-prefill skip-prompt-log-probs symmetric-ar-type use-inference-optimized-layers
    use-legacy-static-engine
    """,
)

OTHER_FLAGS = (*MORE_EXPERTS, *OTHER_BLOCKS, *OTHER_MODELS, *OTHER_OBJECTIVES, *MORE_INFERENCE)
