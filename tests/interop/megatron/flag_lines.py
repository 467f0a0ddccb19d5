"""Command lines for tests of the flag table: a small one, and one for each mapped flag."""

import re
import shlex

from megajax.interop.megatron.flags.reading import Word
from megajax.interop.megatron.flags.translate import Converted, convert
from megajax.training.run_config import RunConfig

BASE = {
    "num-layers": "4",
    "hidden-size": "64",
    "num-attention-heads": "4",
    "seq-length": "32",
    "max-position-embeddings": "32",
    "micro-batch-size": "2",
    "global-batch-size": "8",
    "train-iters": "10",
    "lr": "1e-3",
    "mock-data": "",
    "tokenizer-type": "NullTokenizer",
    "vocab-size": "255",
    "eval-interval": "5",
}


def line(changes: str = "") -> str:
    """The base line with flags added, changed, or removed (--without name); a script's name may precede them."""
    flags = dict(BASE)
    for part in re.split(r"\s*--(?=[a-z])", changes)[1:]:
        name, _, value = part.partition(" ")
        if name == "without":
            flags.pop(value)
        else:
            flags[name] = value
    return " ".join(f"--{name} {value}".rstrip() for name, value in flags.items())


def convert_line(changes: str = "", **options: int) -> Converted:
    """The result of converting a line; `changes` may begin with the name of a script."""
    script = changes.partition(" --")[0] if changes.startswith("pretrain_") else ""
    return convert([Word(word) for word in shlex.split(line(changes))], script=script, **options)


def config(changes: str = "", **options: int) -> RunConfig:
    converted = convert_line(changes, **options)
    assert not converted.problems and not converted.refused, (converted.problems, converted.refused)
    assert converted.config is not None
    return converted.config


def problem(changes: str) -> str:
    converted = convert_line(changes)
    assert converted.config is None
    return "\n".join(str(problem) for problem in converted.problems)


LOCAL = "--non-persistent-save-interval 5 --non-persistent-ckpt-type local --non-persistent-local-ckpt-dir d"
REPLICATION = "--replication --replication-factor 3 --replication-jump 4"
LEVELS = "--context-parallel-size 4 --cp-comm-type a2a+p2p"
CHATS = "--without mock-data --data-path a.jsonl --sft"
MOE = "--num-experts 4"
SIGMOID = f"{MOE} --moe-router-score-function sigmoid"
HYBRID = "--without num-layers --hybrid-layer-pattern M*M* --mamba-num-groups 2"
FIM = "--without mock-data --data-path a --fim-data"
FILES = "--without mock-data --data-path a --without tokenizer-type --vocab-file v --merge-file m"
TIKTOKEN = "--tokenizer-type TikTokenizer --tokenizer-model t.json --vocab-size 5000"
WORDPIECE = "--tokenizer-type BertWordPieceLowerCase --vocab-file v.txt"
BERT = f"pretrain_bert.py --without mock-data --data-path a {WORDPIECE}"
T5 = f"pretrain_t5.py --without mock-data --data-path a {WORDPIECE} --decoder-seq-length 16"
VLM = "pretrain_vlm.py --img-h 16 --img-w 16 --patch-dim 4"
OVERLAP = f"{VLM} --decoder-tp-comm-overlap --sequence-parallel --tensor-model-parallel-size 2"
RELATIVE = f"{T5} --position-embedding-type relative"
MLA = "--multi-latent-attention --position-embedding-type rope"
ROPE = "--position-embedding-type rope"
YARN = "--position-embedding-type yarn --rotary-scaling-factor 32"
FP8 = "--bf16 --fp8-recipe tensorwise"
DELAYED = "--bf16 --fp8-format hybrid"
MUP = "--use-mup --mup-base-hidden-size 32"
CASES = {
    "num-layers": "--num-layers 6",
    "encoder-num-layers": "--without num-layers --encoder-num-layers 6",
    "hidden-size": "--hidden-size 128",
    "num-attention-heads": "--num-attention-heads 8",
    "ffn-hidden-size": "--ffn-hidden-size 100",
    "kv-channels": "--kv-channels 8",
    "group-query-attention": "--group-query-attention",
    "num-query-groups": "--group-query-attention --num-query-groups 2",
    "seq-length": "--seq-length 16",
    "encoder-seq-length": "--without seq-length --encoder-seq-length 16",
    "make-vocab-size-divisible-by": "--make-vocab-size-divisible-by 64",
    "vocab-size": "--vocab-size 300",
    "padded-vocab-size": "--padded-vocab-size 1024",
    "untie-embeddings-and-output-weights": "--untie-embeddings-and-output-weights",
    "decoder-num-layers": f"{T5} | --decoder-num-layers 3",
    "decoder-seq-length": f"{T5} | --decoder-seq-length 8",
    "bert-no-binary-head": f"{BERT} | --bert-no-binary-head",
    "mask-prob": f"{BERT} | --mask-prob 0.3",
    "short-seq-prob": f"{T5} | --short-seq-prob 0.3",
    "relative-attention-num-buckets": f"{RELATIVE} | --relative-attention-num-buckets 16",
    "relative-attention-max-distance": f"{RELATIVE} | --relative-attention-max-distance 64",
    "position-embedding-type": ROPE,
    "use-rotary-position-embeddings": "--use-rotary-position-embeddings",
    "rotary-base": f"{ROPE} --rotary-base 500000",
    "rotary-percent": f"{ROPE} --rotary-percent 0.5",
    "rotary-interleaved": f"{ROPE} --rotary-interleaved",
    "rotary-seq-len-interpolation-factor": f"{ROPE} --rotary-seq-len-interpolation-factor 2",
    "use-rope-scaling": f"{ROPE} --use-rope-scaling",
    "rope-scaling-factor": f"{ROPE} --use-rope-scaling --rope-scaling-factor 32",
    "no-rope-freq": f"{ROPE} --no-rope-freq 4",
    "normalization": "--normalization RMSNorm",
    "norm-epsilon": "--norm-epsilon 1e-6",
    "apply-layernorm-1p": "--apply-layernorm-1p",
    "swiglu": "--swiglu",
    "squared-relu": "--squared-relu",
    "quick-geglu": "--quick-geglu",
    "openai-gelu": "--no-bias-gelu-fusion | --openai-gelu",
    "no-bias-gelu-fusion": "--no-bias-gelu-fusion",
    "activation-func-clamp-value": "--quick-geglu --activation-func-clamp-value 7",
    "glu-linear-offset": "--quick-geglu --glu-linear-offset 1",
    "disable-bias-linear": "--disable-bias-linear",
    "add-qkv-bias": "--disable-bias-linear | --add-qkv-bias",
    "qk-layernorm": "--qk-layernorm",
    "fp32-residual-connection": "--bf16 | --fp32-residual-connection",
    "qk-l2-norm": "--qk-l2-norm",
    "window-size": "--window-size 8,0",
    "window-attn-skip-freq": "--window-size 8,0 --window-attn-skip-freq 2",
    "softmax-type": "--softmax-type learnable",
    "softmax-scale": "--softmax-scale 0.25",
    "yarn-original-max-position-embeddings": f"{YARN} | --yarn-original-max-position-embeddings 2048",
    "yarn-beta-fast": f"{YARN} | --yarn-beta-fast 16",
    "yarn-beta-slow": f"{YARN} | --yarn-beta-slow 2",
    "no-yarn-correction-range-round-to-int": f"{YARN} | --no-yarn-correction-range-round-to-int",
    "attention-output-gate": "--attention-output-gate",
    "attention-backend": "--attention-backend unfused",
    "hidden-dropout": "--hidden-dropout 0.2",
    "attention-dropout": "--attention-dropout 0.2",
    "init-method-std": "--init-method-std 0.01",
    "embedding-init-method-std": "--embedding-init-method-std 1.0",
    "use-mup": "--use-mup",
    "mup-base-hidden-size": "--use-mup | --mup-base-hidden-size 16",
    "mup-base-head-dim": f"{MUP} | --mup-base-head-dim 8",
    "mup-embedding-mult": f"{MUP} | --mup-embedding-mult 10",
    "mup-output-mult": f"{MUP} | --mup-output-mult 0.5",
    "mup-attn-scale-power": f"{MUP} | --mup-attn-scale-power 0.5",
    "multi-latent-attention": MLA,
    "q-lora-rank": f"{MLA} --q-lora-rank 24",
    "kv-lora-rank": f"{MLA} --kv-lora-rank 24",
    "qk-head-dim": f"{MLA} --qk-head-dim 24",
    "qk-pos-emb-head-dim": f"{MLA} --qk-pos-emb-head-dim 24",
    "v-head-dim": f"{MLA} --v-head-dim 24",
    "rope-type": f"{MLA} | --rope-type rope",
    "rotary-scaling-factor": f"{MLA} --rotary-scaling-factor 40",
    "original-max-position-embeddings": f"{MLA} --original-max-position-embeddings 16",
    "beta-fast": f"{MLA} --beta-fast 16",
    "beta-slow": f"{MLA} --beta-slow 2",
    "mscale": f"{MLA} --mscale 0.7",
    "mscale-all-dim": f"{MLA} --mscale-all-dim 0.7",
    "mtp-num-layers": f"{ROPE} --mtp-num-layers 2",
    "mtp-loss-scaling-factor": f"{ROPE} --mtp-num-layers 1 --mtp-loss-scaling-factor 0.3",
    "recompute-activations": "--recompute-activations",
    "recompute-granularity": "--recompute-granularity full",
    "recompute-method": "--recompute-granularity full | --recompute-method uniform --recompute-num-layers 2",
    "recompute-num-layers": "--recompute-granularity full --recompute-method block --recompute-num-layers 1",
    "fine-grained-activation-offloading":
        "--recompute-activations --offload-modules core_attn | --fine-grained-activation-offloading",
    "offload-modules": "--fine-grained-activation-offloading --offload-modules core_attn attn_norm",
    "recompute-modules": "--recompute-granularity selective --recompute-modules core_attn mlp",
    "max-position-embeddings": None,
    "micro-batch-size": "--micro-batch-size 4",
    "global-batch-size": "--global-batch-size 16",
    "rampup-batch-size": "--rampup-batch-size 2 2 20",
    "step-batch-size-schedule": "--without global-batch-size --step-batch-size-schedule 0:4 1K:8",
    "decrease-batch-size-if-needed": "--decrease-batch-size-if-needed",
    "train-iters": "--train-iters 20",
    "train-samples": "--without train-iters --train-samples 100",
    "calculate-per-token-loss": "--calculate-per-token-loss",
    "eval-iters": "--eval-iters 3",
    "eval-interval": "--eval-interval 3",
    "eval-micro-batch-size": None,
    "eval-global-batch-size": None,
    "optimizer": "--optimizer sgd",
    "weight-decay": "--weight-decay 0.1",
    "clip-grad": "--clip-grad 0",
    "adam-beta1": "--adam-beta1 0.8",
    "adam-beta2": "--adam-beta2 0.95",
    "adam-eps": "--adam-eps 1e-6",
    "optimizer-cpu-offload": "--optimizer-cpu-offload",
    "optimizer-offload-fraction": "--optimizer-cpu-offload | --optimizer-offload-fraction 0.5",
    "sgd-momentum": "--optimizer sgd --sgd-momentum 0.5",
    "lion-beta1": "--optimizer lion --lion-beta1 0.8",
    "lion-beta2": "--optimizer lion --lion-beta2 0.8",
    "muon-momentum": "--optimizer muon --muon-momentum 0.8",
    "muon-use-nesterov": "--optimizer muon | --muon-use-nesterov",
    "muon-num-ns-steps": "--optimizer muon --muon-num-ns-steps 10",
    "muon-coefficient-type": "--optimizer muon --muon-coefficient-type simple",
    "muon-scale-mode": "--optimizer muon --muon-scale-mode unit_rms_norm",
    "muon-extra-scale-factor": "--optimizer muon --muon-extra-scale-factor 0.2",
    "muon-tp-mode": "--optimizer muon --muon-tp-mode distributed",
    "no-weight-decay-cond-type": "--no-weight-decay-cond-type apply_wd_to_qk_layernorm",
    "decoupled-lr": "--decoupled-lr 1e-4",
    "decoupled-min-lr": "--decoupled-lr 1e-4 --decoupled-min-lr 1e-5",
    "apply-wd-to-qk-layernorm": "--apply-wd-to-qk-layernorm",
    "use-precision-aware-optimizer": None,
    "main-grads-dtype": None,
    "main-params-dtype": None,
    "exp-avg-dtype": None,
    "exp-avg-sq-dtype":
        "--use-precision-aware-optimizer --adam-beta2 0.95 --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16",
    "log-params-norm": "--log-params-norm",
    "log-num-zeros-in-grad": "--log-num-zeros-in-grad",
    "lr": "--lr 1e-4",
    "min-lr": "--min-lr 1e-5",
    "lr-decay-style": "--lr-decay-style inverse-square-root",
    "lr-decay-iters": "--lr-decay-iters 8",
    "lr-decay-samples": "--without train-iters --train-samples 100 --lr-decay-samples 80",
    "lr-warmup-fraction": "--lr-warmup-fraction 0.1",
    "lr-warmup-iters": "--lr-warmup-iters 2",
    "lr-warmup-samples": "--without train-iters --train-samples 100 --lr-warmup-samples 10",
    "lr-warmup-init": "--lr-warmup-init 1e-6",
    "lr-wsd-decay-style": "--lr-decay-style WSD --lr-wsd-decay-iters 2 --lr-wsd-decay-style minus_sqrt",
    "lr-wsd-decay-iters": "--lr-decay-style WSD --lr-wsd-decay-iters 2",
    "lr-wsd-decay-samples": "--lr-decay-style WSD --lr-wsd-decay-samples 16",
    "start-weight-decay": "--weight-decay-incr-style linear --start-weight-decay 0 --end-weight-decay 0.1",
    "end-weight-decay": "--weight-decay-incr-style linear --start-weight-decay 0 --end-weight-decay 0.1",
    "weight-decay-incr-style": "--weight-decay-incr-style cosine --start-weight-decay 0 --end-weight-decay 0.1",
    "override-opt_param-scheduler": "--override-opt_param-scheduler",
    "use-checkpoint-opt_param-scheduler": None,
    "deterministic-mode": "--deterministic-mode",
    "fp16": "--fp16",
    "fp8-format": f"{FP8} --fp8-format e4m3",
    "activations-checkpoint-method": "--activations-checkpoint-method uniform",
    "megatron-fsdp-main-grads-dtype": "--use-megatron-fsdp | --megatron-fsdp-main-grads-dtype bf16",
    "megatron-fsdp-grad-comm-dtype":
        "--use-megatron-fsdp | --megatron-fsdp-main-grads-dtype bf16 --megatron-fsdp-grad-comm-dtype bf16",
    "fp8-param-gather": f"{FP8} --fp8-format hybrid --use-distributed-optimizer | --fp8-param-gather",
    "fp8-hybrid": f"{FP8} | --fp8-hybrid",
    "fp8-e4m3": f"{FP8} --fp8-e4m3",
    "fp8-recipe": f"{FP8} --fp8-format hybrid",
    "fp8-margin": f"{DELAYED} | --fp8-margin 1",
    "fp8-amax-history-len": f"{DELAYED} | --fp8-amax-history-len 16",
    "fp8-amax-compute-algo": f"{DELAYED} | --fp8-amax-compute-algo max",
    "first-last-layers-bf16": f"{FP8} --fp8-format hybrid | --first-last-layers-bf16",
    "num-layers-at-start-in-bf16":
        f"{FP8} --fp8-format hybrid --first-last-layers-bf16 | --num-layers-at-start-in-bf16 0",
    "num-layers-at-end-in-bf16": f"{FP8} --fp8-format hybrid --first-last-layers-bf16 | --num-layers-at-end-in-bf16 0",
    "bf16": "--bf16",
    "loss-scale": "--fp16 --loss-scale 128",
    "initial-loss-scale": "--fp16 --initial-loss-scale 65536",
    "min-loss-scale": "--fp16 --min-loss-scale 2",
    "loss-scale-window": "--fp16 --loss-scale-window 500",
    "hysteresis": "--fp16 --hysteresis 4",
    "grad-reduce-in-bf16": "--bf16 --grad-reduce-in-bf16",
    "accumulate-allreduce-grads-in-fp32": None,
    "ddp-reduce-scatter-with-fp32-accumulation": None,
    "tensor-model-parallel-size": "--tensor-model-parallel-size 2",
    "pipeline-model-parallel-size": "--pipeline-model-parallel-size 2",
    "context-parallel-size": "--context-parallel-size 2",
    "cp-comm-type": "--context-parallel-size 2 | --cp-comm-type a2a",
    "hierarchical-context-parallel-sizes": f"{LEVELS} --hierarchical-context-parallel-sizes 4 1",
    "num-experts": MOE,
    "moe-layer-freq": f"{MOE} | --moe-layer-freq 2",
    "moe-ffn-hidden-size": f"{MOE} | --moe-ffn-hidden-size 96",
    "moe-shared-expert-intermediate-size": f"{MOE} | --moe-shared-expert-intermediate-size 80",
    "moe-shared-expert-gate": f"{MOE} --moe-shared-expert-intermediate-size 80 | --moe-shared-expert-gate",
    "moe-latent-size": f"{MOE} | --moe-latent-size 32",
    "moe-router-topk": f"{MOE} | --moe-router-topk 1",
    "moe-router-score-function": f"{MOE} | --moe-router-score-function sigmoid",
    "moe-router-pre-softmax": f"{MOE} | --moe-router-pre-softmax",
    "moe-router-num-groups": f"{MOE} | --moe-router-num-groups 2 --moe-router-group-topk 1",
    "moe-router-group-topk": f"{MOE} | --moe-router-num-groups 2 --moe-router-group-topk 1",
    "moe-router-topk-scaling-factor": f"{MOE} | --moe-router-topk-scaling-factor 2.5",
    "moe-router-enable-expert-bias": f"{SIGMOID} | --moe-router-enable-expert-bias",
    "moe-router-bias-update-rate": f"{SIGMOID} --moe-router-enable-expert-bias | --moe-router-bias-update-rate 0.01",
    "moe-router-load-balancing-type": f"{MOE} | --moe-router-load-balancing-type sinkhorn",
    "moe-aux-loss-coeff": f"{MOE} | --moe-aux-loss-coeff 0.01",
    "moe-z-loss-coeff": f"{MOE} | --moe-z-loss-coeff 1e-3",
    "moe-input-jitter-eps": f"{MOE} | --moe-input-jitter-eps 0.01",
    "moe-router-force-load-balancing": f"{MOE} | --moe-router-force-load-balancing",
    "moe-expert-capacity-factor": f"{MOE} | --moe-expert-capacity-factor 1.25",
    "moe-token-drop-policy": f"{MOE} --moe-expert-capacity-factor 1.25 | --moe-token-drop-policy position",
    "moe-token-dispatcher-type": f"{MOE} | --moe-token-dispatcher-type allgather",
    "moe-expert-rank-capacity-factor": f"{MOE} | --moe-expert-rank-capacity-factor 1.5",
    "moe-layer-recompute": "--moe-layer-recompute",
    "expert-model-parallel-size": f"{MOE} | --expert-model-parallel-size 2",
    "expert-tensor-parallel-size":
        f"{MOE} --tensor-model-parallel-size 2 --sequence-parallel | --expert-model-parallel-size 2"
        " --expert-tensor-parallel-size 1",
    "hybrid-layer-pattern": HYBRID,
    "hybrid-attention-ratio": "--mamba-num-groups 2 | --hybrid-attention-ratio 0.25",
    "hybrid-mlp-ratio": "--mamba-num-groups 2 --hybrid-attention-ratio 0.25 | --hybrid-mlp-ratio 0.5",
    "mtp-hybrid-override-pattern": f"{HYBRID} | --mtp-num-layers 1 --mtp-hybrid-override-pattern *",
    "mamba-state-dim": f"{HYBRID} | --mamba-state-dim 64",
    "mamba-head-dim": f"{HYBRID} | --mamba-head-dim 32",
    "mamba-num-groups": f"{HYBRID} | --mamba-num-groups 1",
    "mamba-num-heads": f"{HYBRID} | --mamba-num-heads 4",
    "num-layers-per-virtual-pipeline-stage":
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
    "num-virtual-stages-per-pipeline-rank": "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
    "pipeline-model-parallel-layout": "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Ettt|tL",
    "decoder-first-pipeline-num-layers": "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 1",
    "decoder-last-pipeline-num-layers": "--pipeline-model-parallel-size 2 --decoder-last-pipeline-num-layers 1",
    "account-for-embedding-in-pipeline-split": None,
    "account-for-loss-in-pipeline-split": None,
    "sequence-parallel": "--tensor-model-parallel-size 2 --sequence-parallel",
    "use-distributed-optimizer": "--use-distributed-optimizer",
    "use-megatron-fsdp": "--use-megatron-fsdp",
    "data-parallel-sharding-strategy": "--use-megatron-fsdp --data-parallel-sharding-strategy optim",
    "use-torch-fsdp2": "--use-torch-fsdp2",
    "torch-fsdp2-no-reshard-after-forward": "--use-torch-fsdp2 | --torch-fsdp2-no-reshard-after-forward",
    "data-path": f"{FILES} --data-path 0.3 a 0.7 b",
    "data-args-path": None,
    "per-split-data-args-path": None,
    "train-data-path": "--without mock-data --train-data-path a",
    "valid-data-path": "--without mock-data --train-data-path a --valid-data-path b",
    "test-data-path": "--without mock-data --train-data-path a --test-data-path b",
    "split": "--without mock-data --data-path a --split 8,1,1",
    "data-cache-path": "--without mock-data --data-path a --data-cache-path c",
    "mock-data": None,
    "dataloader-type": "--dataloader-type cyclic",
    "no-data-sharding": "--dataloader-type cyclic | --no-data-sharding",
    "reset-position-ids": "--without mock-data --data-path a --reset-position-ids",
    "reset-attention-mask": "--without mock-data --data-path a --reset-attention-mask",
    "eod-mask-loss": "--without mock-data --data-path a --eod-mask-loss",
    "dataloader-inter-document-masking": "--dataloader-inter-document-masking",
    "mid-level-dataset-surplus": "--without mock-data --data-path a --mid-level-dataset-surplus 0.01",
    "fim-data": FIM,
    "fim-rate": f"{FIM} --fim-rate 0.9",
    "fim-spm-rate": f"{FIM} --fim-spm-rate 0.1",
    "fim-split-sample": f"{FIM} --fim-split-sample <file_sep> --fim-fragment-rate 0.7",
    "fim-fragment-rate": f"{FIM} --fim-split-sample <file_sep> --fim-fragment-rate 0.7",
    "fim-no-prefix": f"{FIM} --fim-no-prefix <no>",
    "fim-prefix-token": f"{FIM} --fim-prefix-token <p>",
    "fim-middle-token": f"{FIM} --fim-middle-token <m>",
    "fim-suffix-token": f"{FIM} --fim-suffix-token <s>",
    "sft": CHATS,
    "sft-tokenizer-prompt-format": f"{CHATS} --sft-tokenizer-prompt-format identity",
    "tokenizer-type": "--tokenizer-type HuggingFaceTokenizer --tokenizer-model t.json",
    "tokenizer-model": "--tokenizer-type HuggingFaceTokenizer --tokenizer-model t.json",
    "tiktoken-pattern": f"{TIKTOKEN} | --tiktoken-pattern v1",
    "tiktoken-num-special-tokens": f"{TIKTOKEN} | --tiktoken-num-special-tokens 500",
    "special-tokens": f"{TIKTOKEN} | --special-tokens <unk> <s> </s>",
    "tokenizer-sentencepiece-legacy": None,
    "vocab-extra-ids": f"{WORDPIECE} | --vocab-extra-ids 100",
    "vocab-file": FILES,
    "merge-file": FILES,
    "save": "--save s",
    "load": "--load l",
    "pretrained-checkpoint": "--pretrained-checkpoint p",
    "finetune": "--load l | --finetune",
    "no-load-optim": "--load l | --no-load-optim",
    "save-interval": "--save s --save-interval 5",
    **dict.fromkeys((f"non-persistent-{name}" for name in ("save-interval", "ckpt-type", "local-ckpt-dir")), LOCAL),
    **dict.fromkeys(("replication", "replication-factor", "replication-jump"), f"{LOCAL} {REPLICATION}"),
    "most-recent-k": "--save s --save-interval 5 --most-recent-k 2",
    "save-retain-interval": "--save s --save-interval 5 --save-retain-interval 10",
    "ckpt-step": "--ckpt-step 7",
    "async-save": None,
    "seed": "--seed 7",
    "exit-interval": "--exit-interval 5",
    "exit-duration-in-mins": "--exit-duration-in-mins 230",
    "exit-signal-handler": None,
    "iterations-to-skip": "--iterations-to-skip 3 4",
    "check-for-spiky-loss": "--check-for-spiky-loss",
    "no-check-for-nan-in-loss-and-grad": "--no-check-for-nan-in-loss-and-grad",
    "rerun-mode": "--rerun-mode disabled",
    "grad-norm-skip-threshold": "--grad-norm-skip-threshold 10",
    "check-weight-hash-across-dp-replicas-interval": "--check-weight-hash-across-dp-replicas-interval 50",
    "full-validation": "--full-validation",
    "multiple-validation-sets":
        "--without mock-data --train-data-path t --valid-data-path a/x b/x c --multiple-validation-sets",
    "profile": "--train-iters 20 --profile",
    "profile-step-start": "--profile --profile-step-start 2 --profile-step-end 4",
    "profile-step-end": "--profile --profile-step-start 2 --profile-step-end 4",
    "profile-ranks": "--train-iters 20 --profile --profile-ranks 0 8",
    "log-interval": "--log-interval 7",
    "tensorboard-dir": "--tensorboard-dir t",
    "wandb-project": "--wandb-project p",
    "wandb-exp-name": "--wandb-project p --wandb-exp-name n",
}  # fmt: skip
"""Mapped flag -> a line in which it changes one of its settings. None: the flag changes nothing by itself, and another
test covers it. Settings are compared with those of the base line, or of the part before " | "."""
CASES_OF = {
    "pretrain_bert.py": {"tokenizer-type": f"{BERT} | --tokenizer-type BertWordPieceCase"},
    "pretrain_t5.py": {
        "tokenizer-type": f"{T5} | --tokenizer-type BertWordPieceCase",
        "num-layers": f"{T5} | --num-layers 6",
        "encoder-num-layers": f"{T5} | --without num-layers --encoder-num-layers 6",
        "seq-length": f"{T5} | --seq-length 24",
        "encoder-seq-length": f"{T5} | --without seq-length --encoder-seq-length 24",
    },
    "pretrain_vlm.py": {
        "num-layers": f"{VLM} | --num-layers 6",
        "encoder-num-layers": f"{VLM} | --without num-layers --encoder-num-layers 6 --decoder-num-layers 4",
        "decoder-num-layers": f"{VLM} | --decoder-num-layers 3",
        "hidden-size": f"{VLM} | --hidden-size 128",
        "num-attention-heads": f"{VLM} | --num-attention-heads 8",
        "ffn-hidden-size": f"{VLM} | --ffn-hidden-size 100",
        "img-h": f"{VLM} | --img-h 8",
        "img-w": f"{VLM} | --img-w 8",
        "patch-dim": f"{VLM} | --patch-dim 8",
        "disable-vision-class-token": f"{VLM} | --disable-vision-class-token",
        "dataloader-seq-length": f"{VLM} | --dataloader-seq-length 40",
        "decoder-seq-length": f"{OVERLAP} --decoder-seq-length 50 | --decoder-seq-length 52",
        "freeze-LM": f"{VLM} | --freeze-LM",
        "freeze-ViT": f"{VLM} | --freeze-ViT",
    },
}
"""The same for flags with another meaning for a script."""
