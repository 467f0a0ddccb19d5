"""A laptop's twin of a Megatron-LM command: the same kinds of layers, optimizer and schedule, with small sizes."""

import re
from collections.abc import Iterator, Sequence

SIZES = {
    **dict.fromkeys(("num-layers", "encoder-num-layers", "decoder-num-layers", "lr-warmup-iters"), 2),
    **dict.fromkeys(("num-query-groups", "moe-router-num-groups", "mamba-num-groups"), 2),
    **dict.fromkeys(("num-attention-heads", "num-experts"), 4),
    **dict.fromkeys(("qk-pos-emb-head-dim", "mamba-num-heads", "global-batch-size"), 8),
    **dict.fromkeys(("kv-channels", "qk-head-dim", "v-head-dim", "mamba-state-dim", "mamba-head-dim"), 16),
    **dict.fromkeys(("q-lora-rank", "kv-lora-rank", "decoder-seq-length"), 32),
    **dict.fromkeys(("hidden-size", "seq-length", "encoder-seq-length", "max-position-embeddings"), 64),
    **dict.fromkeys(("moe-ffn-hidden-size", "moe-shared-expert-intermediate-size"), 64),
    **dict.fromkeys(("micro-batch-size", "moe-router-group-topk", "mtp-num-layers"), 1),
    **dict.fromkeys(("train-iters", "lr-decay-iters", "save-interval"), 20),
    **dict.fromkeys(("train-samples", "lr-decay-samples"), 160),
    "ffn-hidden-size": 128,
    "lr-warmup-samples": 16,
    "lr-wsd-decay-iters": 5,
    "lr-wsd-decay-samples": 40,
    "eval-interval": 10,
}
"""Flag -> its value in the twin, if the command gives it; moe-router-topk is at most 2."""
ADDED = ["--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "511"]
"""What needs no files."""
DROPPED = re.compile(
    r"(tensor|pipeline|context|expert|encoder-tensor|encoder-pipeline)-(model-|tensor-)?parallel-.*|sequence-parallel|"
    r"num-(layers-per-virtual-pipeline-stage|virtual-stages-per-pipeline-rank|distributed-optimizer-instances)|"
    r"(decoder|encoder)-(first|last)-pipeline-.*|account-for-.*|(no-)?overlap-.*|tp-comm-.*|cp-comm-type|"
    r"hierarchical-context-.*|distribute-saved-activations|microbatch-group-size-.*|rampup-batch-size|"
    r"(train-|valid-|test-)?data-(path|args-path|cache-path)|per-split-data-args-path|mock-data|"
    r"tokenizer-.*|tiktoken-.*|vocab-.*|merge-file|make-vocab-size-divisible-by|load|save|pretrained-checkpoint|"
    r"ckpt-.*|tensorboard-.*|wandb-.*|num-workers|exit-.*"
)
"""Flags of the cluster, of files and of what is watched."""


def toy_words(words: Sequence[str]) -> tuple[str, ...]:
    """The flags of the twin."""
    flags: dict[str, list[str]] = {}
    for name, values in _flags(words):
        if DROPPED.fullmatch(name):
            continue
        if name in SIZES:
            values = [str(SIZES[name])]
        elif name == "moe-router-topk":
            values = ["1"] if values == ["1"] else ["2"]
        elif name == "moe-layer-freq":  # a list of 0 and 1, or every n-th layer
            text = "".join(values)
            dense = text != "1" if text.isdigit() else re.search(r"\b0\b", text)
            values = ["([0]*1+[1]*1)"] if dense else ["1"]
        elif name in ("hybrid-override-pattern", "hybrid-layer-pattern", "mtp-hybrid-override-pattern"):
            values = [_pattern("".join(values))]
        flags[name] = values
    flags |= {"log-interval": ["1"], "eval-iters": ["2"]}
    if "fp16" in flags:
        flags["initial-loss-scale"] = ["4096"]  # 20 steps are too few for 2^32 to fall
    for pattern in ("hybrid-override-pattern", "hybrid-layer-pattern"):
        if pattern in flags and "num-layers" in flags:
            flags["num-layers"] = [str(len(flags[pattern][0].partition("/")[0]))]
    return (*(word for name, values in flags.items() for word in (f"--{name}", *values)), *ADDED)


def _pattern(text: str) -> str:
    """Each kind of layer once, and after a / once the layers of multi-token prediction."""
    parts = ["".join(dict.fromkeys(part.replace("|", ""))) for part in text.split("/")[:2]]
    return "/".join(parts)


def _flags(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Each flag with its values."""
    name, values = "", list[str]()
    for word in (*words, "--"):
        if not word.startswith("--"):
            values.append(word)
            continue
        if name:
            yield name, values
        name, equals, value = word[2:].partition("=")
        name, values = name.replace("_", "-"), [value] if equals else []
