"""Command lines for tests of the flag table: a small one, and one for each mapped flag."""

import re
import shlex

from megajax.interop.megatron.flags.translate import Converted, convert
from megajax.training.run_config import RunConfig

BASE = {
    "num-layers": "4", "hidden-size": "64", "num-attention-heads": "4", "seq-length": "32",
    "max-position-embeddings": "32", "micro-batch-size": "2", "global-batch-size": "8", "train-iters": "10",
    "lr": "1e-3", "mock-data": "", "tokenizer-type": "NullTokenizer", "vocab-size": "255", "eval-interval": "5",
}  # fmt: skip


def flags_of(text: str) -> list[str]:
    """NAME VALUE of each flag of a line."""
    return re.split(r"\s*--(?=[a-z])", text)[1:]


def line(changes: str = "") -> str:
    """The base line with flags added, changed, or removed (--without name); a script's name may precede them."""
    flags = dict(BASE)
    for part in flags_of(changes):
        name, _, value = part.partition(" ")
        if name == "without":
            flags.pop(value)
        else:
            flags[name] = value
    return " ".join(f"--{name} {value}".rstrip() for name, value in flags.items())


def convert_line(changes: str = "", **options: int) -> Converted:
    """The result of converting a line; `changes` may begin with the name of a script."""
    script = changes.partition(" --")[0] if changes.startswith("pretrain_") else ""
    return convert(shlex.split(line(changes)), script=script, **options)


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
AFTER = {
    "": (
        "--num-layers 6 --hidden-size 128 --num-attention-heads 8 --ffn-hidden-size 100 --kv-channels 8"
        " --group-query-attention --seq-length 16 --make-vocab-size-divisible-by 64 --vocab-size 300"
        " --padded-vocab-size 1024 --untie-embeddings-and-output-weights --position-embedding-type rope"
        " --use-rotary-position-embeddings --normalization RMSNorm --norm-epsilon 1e-6 --apply-layernorm-1p"
        " --swiglu --squared-relu --quick-geglu --no-bias-gelu-fusion --disable-bias-linear --qk-layernorm"
        " --qk-l2-norm --window-size 8,0 --softmax-type learnable --softmax-scale 0.25 --attention-output-gate"
        " --attention-backend unfused --hidden-dropout 0.2 --attention-dropout 0.2 --init-method-std 0.01"
        " --embedding-init-method-std 1.0 --use-mup --recompute-activations --recompute-granularity full"
        " --micro-batch-size 4 --global-batch-size 16 --rampup-batch-size 2 2 20 --decrease-batch-size-if-needed"
        " --train-iters 20 --calculate-per-token-loss --eval-iters 3 --eval-interval 3 --optimizer sgd"
        " --weight-decay 0.1 --clip-grad 0 --adam-beta1 0.8 --adam-beta2 0.95 --adam-eps 1e-6"
        " --optimizer-cpu-offload --no-weight-decay-cond-type apply_wd_to_qk_layernorm --decoupled-lr 1e-4"
        " --apply-wd-to-qk-layernorm --log-params-norm --log-num-zeros-in-grad --lr 1e-4 --min-lr 1e-5"
        " --lr-decay-style inverse-square-root --lr-decay-iters 8 --lr-warmup-fraction 0.1 --lr-warmup-iters 2"
        " --lr-warmup-init 1e-6 --override-opt_param-scheduler --deterministic-mode --fp16"
        " --activations-checkpoint-method uniform --bf16 --tensor-model-parallel-size 2"
        " --pipeline-model-parallel-size 2 --context-parallel-size 2 --num-experts 4 --moe-layer-recompute"
        " --use-distributed-optimizer --use-megatron-fsdp --use-torch-fsdp2 --dataloader-type cyclic"
        " --dataloader-inter-document-masking --save s --load l --pretrained-checkpoint p --ckpt-step 7 --seed 7"
        " --exit-interval 5 --exit-duration-in-mins 230 --iterations-to-skip 3 4 --check-for-spiky-loss"
        " --no-check-for-nan-in-loss-and-grad --rerun-mode disabled --grad-norm-skip-threshold 10"
        " --check-weight-hash-across-dp-replicas-interval 50 --full-validation --log-interval 7"
        " --tensorboard-dir t --wandb-project p"
    ),
    T5: "--decoder-num-layers 3 --decoder-seq-length 8 --short-seq-prob 0.3",
    BERT: "--bert-no-binary-head --mask-prob 0.3",
    RELATIVE: "--relative-attention-num-buckets 16 --relative-attention-max-distance 64",
    ROPE: (
        "--rotary-base 500000 --rotary-percent 0.5 --rotary-interleaved --rotary-seq-len-interpolation-factor 2"
        " --use-rope-scaling --no-rope-freq 4 --mtp-num-layers 2"
    ),
    "--quick-geglu": "--activation-func-clamp-value 7 --glu-linear-offset 1",
    "--bf16": "--fp32-residual-connection --grad-reduce-in-bf16 --fp4-format e2m1",
    YARN: (
        "--yarn-original-max-position-embeddings 2048 --yarn-beta-fast 16 --yarn-beta-slow 2"
        " --no-yarn-correction-range-round-to-int"
    ),
    MUP: "--mup-base-head-dim 8 --mup-embedding-mult 10 --mup-output-mult 0.5 --mup-attn-scale-power 0.5",
    MLA: (
        "--q-lora-rank 24 --kv-lora-rank 24 --qk-head-dim 24 --qk-pos-emb-head-dim 24 --v-head-dim 24"
        " --rope-type rope --rotary-scaling-factor 40 --original-max-position-embeddings 16 --beta-fast 16"
        " --beta-slow 2 --mscale 0.7 --mscale-all-dim 0.7"
    ),
    "--optimizer lion": "--lion-beta1 0.8 --lion-beta2 0.8",
    "--optimizer muon": (
        "--muon-momentum 0.8 --muon-use-nesterov --muon-num-ns-steps 10 --muon-coefficient-type simple"
        " --muon-scale-mode unit_rms_norm --muon-extra-scale-factor 0.2"
    ),
    "--without train-iters --train-samples 100": "--lr-decay-samples 80 --lr-warmup-samples 10",
    FP8: "--fp8-format e4m3 --fp8-hybrid --fp8-e4m3",
    "--use-megatron-fsdp": "--megatron-fsdp-main-grads-dtype bf16 --data-parallel-sharding-strategy optim",
    DELAYED: "--fp8-margin 1 --fp8-amax-history-len 16 --fp8-amax-compute-algo max",
    "--bf16 --fp8-recipe tensorwise --fp8-format hybrid --first-last-layers-bf16": (
        "--num-layers-at-start-in-bf16 0 --num-layers-at-end-in-bf16 0"
    ),
    "--fp16": ("--loss-scale 128 --initial-loss-scale 65536 --min-loss-scale 2 --loss-scale-window 500 --hysteresis 4"),
    MOE: (
        "--moe-layer-freq 2 --moe-ffn-hidden-size 96 --moe-shared-expert-intermediate-size 80"
        " --moe-latent-size 32 --moe-router-topk 1 --moe-router-score-function sigmoid --moe-router-pre-softmax"
        " --moe-router-topk-scaling-factor 2.5 --moe-router-load-balancing-type sinkhorn --moe-aux-loss-coeff 0.01"
        " --moe-z-loss-coeff 1e-3 --moe-input-jitter-eps 0.01 --moe-router-force-load-balancing"
        " --moe-expert-capacity-factor 1.25 --moe-token-dispatcher-type allgather"
        " --moe-expert-rank-capacity-factor 1.5 --expert-model-parallel-size 2"
    ),
    HYBRID: "--mamba-state-dim 64 --mamba-head-dim 32 --mamba-num-groups 1 --mamba-num-heads 4",
    "--pipeline-model-parallel-size 2": (
        "--num-layers-per-virtual-pipeline-stage 1 --num-virtual-stages-per-pipeline-rank 2"
        " --pipeline-model-parallel-layout Ettt|tL --decoder-first-pipeline-num-layers 1"
        " --decoder-last-pipeline-num-layers 1"
    ),
    "--without mock-data --train-data-path a": "--valid-data-path b --test-data-path b --object-storage-cache-path c",
    "--without mock-data --data-path a": (
        "--split 8,1,1 --data-cache-path c --reset-position-ids --reset-attention-mask --eod-mask-loss"
        " --mid-level-dataset-surplus 0.01 --fim-data"
    ),
    FIM: (
        "--fim-rate 0.9 --fim-spm-rate 0.1 --fim-no-prefix <no> --fim-prefix-token <p> --fim-middle-token <m>"
        " --fim-suffix-token <s>"
    ),
    TIKTOKEN: "--tiktoken-pattern v1 --tiktoken-num-special-tokens 500 --special-tokens <unk> <s> </s>",
    "--load l": "--finetune --no-load-optim",
    "--save s --save-interval 5": "--most-recent-k 2 --save-retain-interval 10",
}
"""A line -> flags, each of which changes one of its settings when it is added."""
NOT_ALONE = (
    "max-position-embeddings", "eval-micro-batch-size", "eval-global-batch-size", "use-precision-aware-optimizer",
    "main-grads-dtype", "main-params-dtype", "exp-avg-dtype", "use-checkpoint-opt_param-scheduler",
    "accumulate-allreduce-grads-in-fp32", "ddp-reduce-scatter-with-fp32-accumulation",
    "account-for-embedding-in-pipeline-split", "account-for-loss-in-pipeline-split", "data-args-path",
    "per-split-data-args-path", "mock-data", "num-distributed-optimizer-instances",
    "tokenizer-sentencepiece-legacy", "async-save", "exit-signal-handler",
)  # fmt: skip
"""Flags that change nothing by themselves, which other tests cover."""
CASES: dict[str, str | None] = {
    **dict.fromkeys(NOT_ALONE),
    **{flag.split()[0]: f"{before} | --{flag}" for before, flags in AFTER.items() for flag in flags_of(flags)},
    "encoder-num-layers": "--without num-layers --encoder-num-layers 6",
    "num-query-groups": "--group-query-attention --num-query-groups 2",
    "encoder-seq-length": "--without seq-length --encoder-seq-length 16",
    "rope-scaling-factor": f"{ROPE} --use-rope-scaling --rope-scaling-factor 32",
    "openai-gelu": "--no-bias-gelu-fusion | --openai-gelu",
    "add-qkv-bias": "--disable-bias-linear | --add-qkv-bias",
    "window-attn-skip-freq": "--window-size 8,0 --window-attn-skip-freq 2",
    "mup-base-hidden-size": "--use-mup | --mup-base-hidden-size 16",
    "multi-latent-attention": MLA,
    "mtp-loss-scaling-factor": f"{ROPE} --mtp-num-layers 1 --mtp-loss-scaling-factor 0.3",
    "recompute-method": "--recompute-granularity full | --recompute-method uniform --recompute-num-layers 2",
    "recompute-num-layers": "--recompute-granularity full --recompute-method block --recompute-num-layers 1",
    "fine-grained-activation-offloading":
        "--recompute-activations --offload-modules core_attn | --fine-grained-activation-offloading",
    "offload-modules": "--fine-grained-activation-offloading --offload-modules core_attn attn_norm",
    "recompute-modules": "--recompute-granularity selective --recompute-modules core_attn mlp",
    "step-batch-size-schedule": "--without global-batch-size --step-batch-size-schedule 0:4 1K:8",
    "train-samples": "--without train-iters --train-samples 100",
    "optimizer-offload-fraction": "--optimizer-cpu-offload | --optimizer-offload-fraction 0.5",
    "sgd-momentum": "--optimizer sgd --sgd-momentum 0.5",
    "decoupled-min-lr": "--decoupled-lr 1e-4 --decoupled-min-lr 1e-5",
    "exp-avg-sq-dtype":
        "--use-precision-aware-optimizer --adam-beta2 0.95 --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16",
    "muon-tp-mode": "--optimizer muon --muon-tp-mode distributed",
    "lr-wsd-decay-iters": "--lr-decay-style WSD --lr-wsd-decay-iters 2",
    "lr-wsd-decay-samples": "--lr-decay-style WSD --lr-wsd-decay-samples 16",
    "lr-wsd-decay-style": "--lr-decay-style WSD --lr-wsd-decay-iters 2 --lr-wsd-decay-style minus_sqrt",
    "start-weight-decay": "--weight-decay-incr-style linear --start-weight-decay 0 --end-weight-decay 0.1",
    "end-weight-decay": "--weight-decay-incr-style linear --start-weight-decay 0 --end-weight-decay 0.1",
    "weight-decay-incr-style": "--weight-decay-incr-style cosine --start-weight-decay 0 --end-weight-decay 0.1",
    "megatron-fsdp-grad-comm-dtype":
        "--use-megatron-fsdp | --megatron-fsdp-main-grads-dtype bf16 --megatron-fsdp-grad-comm-dtype bf16",
    "fp8-param-gather": f"{FP8} --fp8-format hybrid --use-distributed-optimizer | --fp8-param-gather",
    "fp8-recipe": f"{FP8} --fp8-format hybrid",
    "fp4-recipe": "--bf16 --fp4-format e2m1 --fp4-recipe nvfp4",
    "first-last-layers-bf16": f"{FP8} --fp8-format hybrid | --first-last-layers-bf16",
    "cp-comm-type": "--context-parallel-size 2 | --cp-comm-type a2a",
    "hierarchical-context-parallel-sizes": f"{LEVELS} --hierarchical-context-parallel-sizes 4 1",
    "moe-shared-expert-gate": f"{MOE} --moe-shared-expert-intermediate-size 80 | --moe-shared-expert-gate",
    "moe-router-num-groups": f"{MOE} | --moe-router-num-groups 2 --moe-router-group-topk 1",
    "moe-router-group-topk": f"{MOE} | --moe-router-num-groups 2 --moe-router-group-topk 1",
    "moe-router-enable-expert-bias": f"{SIGMOID} | --moe-router-enable-expert-bias",
    "moe-router-bias-update-rate": f"{SIGMOID} --moe-router-enable-expert-bias | --moe-router-bias-update-rate 0.01",
    "moe-token-drop-policy": f"{MOE} --moe-expert-capacity-factor 1.25 | --moe-token-drop-policy position",
    "expert-tensor-parallel-size":
        f"{MOE} --tensor-model-parallel-size 2 --sequence-parallel | --expert-model-parallel-size 2"
        " --expert-tensor-parallel-size 1",
    "hybrid-layer-pattern": HYBRID,
    "hybrid-attention-ratio": "--mamba-num-groups 2 | --hybrid-attention-ratio 0.25",
    "hybrid-mlp-ratio": "--mamba-num-groups 2 --hybrid-attention-ratio 0.25 | --hybrid-mlp-ratio 0.5",
    "mtp-hybrid-override-pattern": f"{HYBRID} | --mtp-num-layers 1 --mtp-hybrid-override-pattern *",
    "sequence-parallel": "--tensor-model-parallel-size 2 --sequence-parallel",
    "torch-fsdp2-no-reshard-after-forward": "--use-torch-fsdp2 | --torch-fsdp2-no-reshard-after-forward",
    "data-path": f"{FILES} --data-path 0.3 a 0.7 b",
    "train-data-path": "--without mock-data --train-data-path a",
    "no-data-sharding": "--dataloader-type cyclic | --no-data-sharding",
    "fim-split-sample": f"{FIM} --fim-split-sample <file_sep> --fim-fragment-rate 0.7",
    "fim-fragment-rate": f"{FIM} --fim-split-sample <file_sep> --fim-fragment-rate 0.7",
    "sft": CHATS,
    "sft-tokenizer-prompt-format": f"{CHATS} --sft-tokenizer-prompt-format identity",
    "tokenizer-type": "--tokenizer-type HuggingFaceTokenizer --tokenizer-model t.json",
    "tokenizer-model": "--tokenizer-type HuggingFaceTokenizer --tokenizer-model t.json",
    "vocab-extra-ids": f"{WORDPIECE} | --vocab-extra-ids 100",
    "vocab-file": FILES,
    "merge-file": FILES,
    "save-interval": "--save s --save-interval 5",
    "multiple-validation-sets":
        "--without mock-data --train-data-path t --valid-data-path a/x b/x c --multiple-validation-sets",
    "profile": "--train-iters 20 --profile",
    "profile-step-start": "--profile --profile-step-start 2 --profile-step-end 4",
    "profile-step-end": "--profile --profile-step-start 2 --profile-step-end 4",
    "profile-ranks": "--train-iters 20 --profile --profile-ranks 0 8",
    "wandb-exp-name": "--wandb-project p --wandb-exp-name n",
    **dict.fromkeys((f"non-persistent-{name}" for name in ("save-interval", "ckpt-type", "local-ckpt-dir")), LOCAL),
    **dict.fromkeys(("replication", "replication-factor", "replication-jump"), f"{LOCAL} {REPLICATION}"),
}  # fmt: skip
"""Mapped flag -> a line in which it changes one of its settings. None: another test covers it.

Settings are compared with those of the base line, or of the part before " | ".
"""
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
