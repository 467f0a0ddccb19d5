"""Megatron-LM's flags about the network: one row each. Moving a flag from refused to a setting is changing its row."""

from megajax.tools.flags import Flag, flag, needless, refused, to
from megajax.tools.megatron_memory import recompute
from megajax.tools.megatron_model import embedding, residual, stack, vocabulary, width_scaling

BLOCK = "model.stack.pattern.0"
MIXER, MLP, NORM = f"{BLOCK}.mixer", f"{BLOCK}.mlp", f"{BLOCK}.norm"

FUSED = "the compiler fuses what can be fused"
FLOAT32 = "softmax, norms and loss are float32 always"
NO_EXPERTS = "mixtures of experts are not in this version"
NO_STATE_SPACE = "Mamba and hybrid models are not in this version"
NO_VISION = "images are not in this version"
NO_T5 = "encoders and encoder-decoders (BERT, T5) are not in this version"
FREE_KERNEL = "kernels are the compiler's or model.stack.pattern.0.mixer.kernel's choice"

SIZES: tuple[Flag, ...] = (
    flag("num-layers", int, to("model.stack.repeats", by=stack)),
    flag("encoder-num-layers", int, to("model.stack.repeats", by=stack)),
    flag("decoder-num-layers", int, refused(NO_T5)),
    flag("hidden-size", int, to("model.hidden", by=embedding)),
    flag("num-attention-heads", int, to(f"{MIXER}.heads", by=stack)),
    flag("ffn-hidden-size", int, to(f"{MLP}.ffn", by=stack)),
    flag("kv-channels", int, to(f"{MIXER}.head_dim", by=stack)),
    flag("group-query-attention", bool, to(f"{MIXER}.kv_heads", by=stack), default=False),
    flag("num-query-groups", int, to(f"{MIXER}.kv_heads", by=stack), default=1),
    flag("max-position-embeddings", int, to("model.learned_positions", by=embedding)),
    flag("seq-length", int, to("model.sequence_length", by=embedding)),
    flag("encoder-seq-length", int, to("model.sequence_length", by=embedding)),
    flag("decoder-seq-length", int, refused(NO_T5)),
    flag("retriever-seq-length", int, refused("retrieval models are not in this version")),
    flag("make-vocab-size-divisible-by", int, to("model.vocabulary_multiple", by=vocabulary), default=128),
    flag("vocab-size", int, to("model.vocabulary_size", by=vocabulary)),
    flag("padded-vocab-size", int, to("model.vocabulary_multiple", by=vocabulary)),
    flag("vocab-extra-ids", int, refused(NO_T5)),
    flag("untie-embeddings-and-output-weights", bool, to("model.tied", by=embedding), default=False),
    flag("hybrid-layer-pattern", str, refused(NO_STATE_SPACE)),
    flag("hybrid-override-pattern", str, refused(NO_STATE_SPACE)),
    flag("is-hybrid-model", bool, refused(NO_STATE_SPACE)),
    flag("spec", list, refused("a specification is Megatron-LM's Python; model.stack.pattern is this")),
    flag("transformer-impl", str, needless("there is one implementation")),
    flag("heterogeneous-layers-config-path", str, refused("give model.stack.pattern one block per layer")),
    flag("use-legacy-models", bool, needless("there is one implementation")),
    flag("use-mcore-models", bool, needless("there is one implementation")),
    flag("use-te-activation-func", bool, needless(FREE_KERNEL)),
    flag("onnx-safe", bool, needless("nothing is exported to ONNX")),
)

POSITIONS: tuple[Flag, ...] = (
    flag("position-embedding-type", str, to("model.learned_positions", f"{MIXER}.rope", by=stack), "learned_absolute"),
    flag("use-rotary-position-embeddings", bool, to(f"{MIXER}.rope", by=stack), default=False),
    flag("no-position-embedding", bool, needless("--position-embedding-type says it")),
    flag("rotary-base", int, to(f"{MIXER}.rope.base", by=stack), default=10000),
    flag("rotary-percent", float, to(f"{MIXER}.rope.fraction", by=stack), default=1.0),
    flag("rotary-interleaved", bool, to(f"{MIXER}.rope.interleaved", by=stack), default=False),
    flag("rotary-seq-len-interpolation-factor", int, to(f"{MIXER}.rope.interpolation", by=stack)),
    flag("use-rope-scaling", bool, to(f"{MIXER}.rope.scaling", by=stack), default=False),
    flag("rope-scaling-factor", float, to(f"{MIXER}.rope.scaling.factor", by=stack), default=8.0),
    flag("no-rope-freq", str, to("model.stack.pattern", by=stack)),
    flag("mrope-section", list, refused(NO_VISION)),
    flag("yarn-original-max-position-embeddings", int, to(f"{MIXER}.rope.scaling.original", by=stack), default=4096),
    flag("yarn-beta-fast", float, to(f"{MIXER}.rope.scaling.fast", by=stack), default=32.0),
    flag("yarn-beta-slow", float, to(f"{MIXER}.rope.scaling.slow", by=stack), default=1.0),
    flag("no-yarn-correction-range-round-to-int", bool, to(f"{MIXER}.rope.scaling.rounded", by=stack), default=False),
    flag(
        "yarn-correction-range-round-to-int", bool, needless("borders are rounded unless the flag with --no- is given")
    ),
    flag("relative-attention-num-buckets", int, refused("set model.stack.pattern.0.mixer.relative by hand"), 32),
    flag("relative-attention-max-distance", int, refused("set model.stack.pattern.0.mixer.relative by hand"), 128),
    flag("no-rope-fusion", bool, needless(FUSED)),
)

ATTENTION: tuple[Flag, ...] = (
    flag("normalization", str, to(f"{NORM}.type", "model.norm.type", by=stack), default="LayerNorm"),
    flag(
        "norm-epsilon",
        float,
        to(f"{NORM}.epsilon", "model.norm.epsilon", by=stack),
        default=1e-5,
        also=("layernorm-epsilon",),
    ),
    flag(
        "apply-layernorm-1p",
        bool,
        to(f"{NORM}.zero_centred", "model.norm.zero_centred", by=stack),
        default=False,
        also=("layernorm-zero-centered-gamma",),
    ),
    flag(
        "apply-residual-connection-post-layernorm",
        bool,
        needless("Megatron-LM accepts it and computes the same without it"),
    ),
    flag("swiglu", bool, to(f"{MLP}.type", f"{MLP}.activation", by=stack), default=False),
    flag("squared-relu", bool, to(f"{MLP}.activation", by=stack), default=False),
    flag("quick-geglu", bool, to(f"{MLP}.type", f"{MLP}.activation", by=stack), default=False),
    flag("openai-gelu", bool, to(f"{MLP}.activation", by=stack), default=False),
    flag("no-bias-gelu-fusion", bool, to(f"{MLP}.activation", by=stack), default=False),
    flag("activation-func-clamp-value", float, to(f"{MLP}.clamp", by=stack)),
    flag("glu-linear-offset", float, to(f"{MLP}.offset", by=stack), default=0.0),
    flag("disable-bias-linear", bool, to(f"{MLP}.bias", f"{MIXER}.bias", by=stack), default=False),
    flag("add-qkv-bias", bool, to(f"{MIXER}.qkv_bias", by=stack), default=False),
    flag("qk-layernorm", bool, to(f"{MIXER}.qk_norm", by=stack), default=False),
    flag("qk-l2-norm", bool, to(f"{MIXER}.qk_norm", by=stack), default=False),
    flag("qk-clip", bool, refused("clipping of query and key weights is not in this version")),
    flag("qk-clip-alpha", float, refused("clipping of query and key weights is not in this version")),
    flag("qk-clip-threshold", float, refused("clipping of query and key weights is not in this version")),
    flag("window-size", str, to(f"{MIXER}.window", by=stack)),
    flag("window-attn-skip-freq", str, to("model.stack.pattern", by=stack)),
    flag("softmax-scale", float, to(f"{MIXER}.scale", by=stack)),
    flag("softmax-type", str, to(f"{MIXER}.sink", by=stack), default="vanilla"),
    flag("attention-output-gate", bool, to(f"{MIXER}.gate", by=stack), default=False),
    flag("attention-backend", str, to(f"{MIXER}.kernel", by=stack), default="auto"),
    flag("use-flash-attn", bool, needless(FREE_KERNEL)),
    flag("attention-softmax-in-fp32", bool, needless(FLOAT32)),
    flag("apply-query-key-layer-scaling", bool, needless("it guards float16 softmax; " + FLOAT32)),
    flag("no-query-key-layer-scaling", bool, needless("it guards float16 softmax; " + FLOAT32)),
    flag("fp32-residual-connection", bool, to("model.residual", by=residual), default=False),
    flag("no-masked-softmax-fusion", bool, needless(FUSED)),
    flag("no-bias-swiglu-fusion", bool, needless(FUSED)),
    flag("no-bias-dropout-fusion", bool, needless(FUSED)),
    flag("bias-swiglu-fusion", bool, needless(FUSED)),
    flag("no-persist-layer-norm", bool, needless(FUSED)),
    flag("cross-entropy-loss-fusion", bool, needless("the loss is made chunk by chunk and cut over the vocabulary")),
    flag("cross-entropy-fusion-impl", str, needless("the loss is made chunk by chunk and cut over the vocabulary")),
    flag("fp16-lm-cross-entropy", bool, needless(FLOAT32)),
)

START: tuple[Flag, ...] = (
    flag("hidden-dropout", float, to(f"{BLOCK}.dropout", "model.dropout", by=stack), default=0.1),
    flag("attention-dropout", float, to(f"{MIXER}.dropout", by=stack), default=0.1),
    flag("init-method-std", float, to("model.init_std"), default=0.02),
    flag(
        "embedding-init-method-std",
        float,
        to("model.embedding_std", "optimizer.decay_embeddings", "optimizer.groups", by=embedding),
    ),
    flag("init-method-xavier-uniform", bool, refused("initial weights are Gaussian: model.init_std")),
    flag("use-mup", bool, to("model.width_scaling", by=width_scaling), default=False),
    flag("mup-base-hidden-size", int, to("model.width_scaling.base_hidden", by=width_scaling)),
    flag("mup-base-head-dim", float, to("model.width_scaling.base_head_dim", by=width_scaling)),
    flag("mup-embedding-mult", float, to("model.width_scaling.embedding", by=width_scaling), default=1.0),
    flag("mup-output-mult", float, to("model.width_scaling.output", by=width_scaling), default=1.0),
    flag("mup-attn-scale-power", float, to("model.width_scaling.score_power", by=width_scaling), default=1.0),
    flag("use-cpu-initialization", bool, needless("initial weights are the same on every layout")),
    flag("no-initialization", bool, needless("weights that are loaded are not drawn first")),
    flag("init-model-with-meta-device", bool, needless("weights are made where they stay")),
    flag("data-parallel-random-init", bool, refused("copies of a weight are one array and begin equal")),
)

LATENT: tuple[Flag, ...] = (
    flag("multi-latent-attention", bool, to(f"{MIXER}.type", by=stack), default=False),
    flag("q-lora-rank", int, to(f"{MIXER}.query_rank", by=stack)),
    flag("kv-lora-rank", int, to(f"{MIXER}.key_value_rank", by=stack), default=32),
    flag("qk-head-dim", int, to(f"{MIXER}.content_dim", by=stack), default=128),
    flag("qk-pos-emb-head-dim", int, to(f"{MIXER}.position_dim", by=stack), default=64),
    flag("v-head-dim", int, to(f"{MIXER}.value_dim", by=stack), default=128),
    flag("rope-type", str, to(f"{MIXER}.rope.scaling", by=stack), default="yarn"),
    flag("rotary-scaling-factor", float, to(f"{MIXER}.rope.scaling.factor", by=stack), default=1.0),
    flag("original-max-position-embeddings", int, to(f"{MIXER}.rope.scaling.original", by=stack), default=4096),
    flag("beta-fast", float, to(f"{MIXER}.rope.scaling.fast", by=stack), default=32.0),
    flag("beta-slow", float, to(f"{MIXER}.rope.scaling.slow", by=stack), default=1.0),
    flag("mscale", float, to(f"{MIXER}.rope.scaling.mscale", by=stack), default=1.0),
    flag("mscale-all-dim", float, to(f"{MIXER}.rope.scaling.mscale_all", by=stack), default=0.0),
    flag("mtp-num-layers", int, to("model.prediction.depth", by=embedding)),
    flag("mtp-loss-scaling-factor", float, to("model.prediction.weight", by=embedding), default=0.1),
    flag("mamba-state-dim", int, refused(NO_STATE_SPACE), default=128),
    flag("mamba-head-dim", int, refused(NO_STATE_SPACE), default=64),
    flag("mamba-num-groups", int, refused(NO_STATE_SPACE), default=8),
    flag("mamba-num-heads", int, refused(NO_STATE_SPACE)),
)

EXPERTS: tuple[Flag, ...] = (
    flag("num-experts", int, refused(NO_EXPERTS), also=("num-moe-experts",)),
    flag("moe-layer-freq", str, refused(NO_EXPERTS), default="1"),
    flag("moe-ffn-hidden-size", int, refused(NO_EXPERTS)),
    flag("moe-shared-expert-intermediate-size", int, refused(NO_EXPERTS)),
    flag("moe-shared-expert-overlap", bool, refused(NO_EXPERTS)),
    flag("moe-shared-expert-gate", bool, refused(NO_EXPERTS)),
    flag("moe-router-topk", int, refused(NO_EXPERTS), default=2),
    flag("moe-router-score-function", str, refused(NO_EXPERTS), default="softmax"),
    flag("moe-router-pre-softmax", bool, refused(NO_EXPERTS)),
    flag("moe-router-num-groups", int, refused(NO_EXPERTS)),
    flag("moe-router-group-topk", int, refused(NO_EXPERTS)),
    flag("moe-router-topk-scaling-factor", float, refused(NO_EXPERTS)),
    flag("moe-router-enable-expert-bias", bool, refused(NO_EXPERTS)),
    flag("moe-router-bias-update-rate", float, refused(NO_EXPERTS), default=1e-3),
    flag("moe-router-load-balancing-type", list, refused(NO_EXPERTS)),
    flag("moe-aux-loss-coeff", list, refused(NO_EXPERTS)),
    flag("moe-z-loss-coeff", float, refused(NO_EXPERTS)),
    flag("moe-input-jitter-eps", float, refused(NO_EXPERTS)),
    flag("moe-router-dtype", str, refused(NO_EXPERTS)),
    flag("moe-router-force-load-balancing", bool, refused(NO_EXPERTS)),
    flag("moe-expert-capacity-factor", float, refused(NO_EXPERTS)),
    flag("moe-pad-expert-input-to-capacity", bool, refused(NO_EXPERTS)),
    flag("moe-token-drop-policy", str, refused(NO_EXPERTS), default="probs"),
    flag("moe-token-dispatcher-type", str, refused(NO_EXPERTS), default="allgather"),
    flag("moe-flex-dispatcher-backend", str, refused(NO_EXPERTS)),
    flag("moe-enable-deepep", bool, refused(NO_EXPERTS)),
    flag("moe-grouped-gemm", bool, refused(NO_EXPERTS)),
    flag("moe-permute-fusion", bool, refused(NO_EXPERTS)),
    flag("moe-router-fusion", bool, refused(NO_EXPERTS)),
    flag("moe-use-upcycling", bool, refused(NO_EXPERTS)),
    flag("moe-per-layer-logging", bool, refused(NO_EXPERTS)),
    flag("moe-latent-size", int, refused(NO_EXPERTS)),
)

MEMORY: tuple[Flag, ...] = (
    flag("recompute-activations", bool, to("model.recompute", by=recompute), default=False),
    flag("recompute-granularity", str, to("model.recompute", by=recompute)),
    flag("recompute-method", str, to("model.recompute_together", by=recompute)),
    flag("recompute-num-layers", int, to("model.recompute_layers", by=recompute)),
    flag("recompute-modules", list, to("model.recompute", by=recompute), default=["core_attn"]),
    flag("checkpoint-activations", bool, refused("Megatron-LM has dropped it too: --recompute-granularity full")),
    flag("distribute-saved-activations", bool, needless("--sequence-parallel cuts what is kept over tensor devices")),
    flag("fine-grained-activation-offloading", bool, to("model.offload", by=recompute), default=False),
    flag("offload-modules", list, to("model.offload", by=recompute)),
    flag("cpu-offloading-num-layers", int, refused("name what moves to host memory in model.offload"), default=0),
    flag("cuda-graph-impl", str, needless("a step is one compiled program"), default="none"),
    flag("cuda-graph-scope", list, needless("a step is one compiled program")),
    flag("cuda-graph-warmup-steps", int, needless("a step is one compiled program")),
    flag("enable-cuda-graph", bool, needless("a step is one compiled program")),
    flag("external-cuda-graph", bool, needless("a step is one compiled program")),
    flag("te-rng-tracker", bool, needless("random numbers follow from seed, step, row and layer")),
    flag("empty-unused-memory-level", int, needless("memory is laid out when the step is compiled")),
)

MODEL_FLAGS = (*SIZES, *POSITIONS, *ATTENTION, *START, *LATENT, *EXPERTS, *MEMORY)
