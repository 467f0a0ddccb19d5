"""The same model and batch trained by MegaJAX and by other trainers on this GPU: ratios of speed and memory."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.outcome import ROOT
from benchmarks.stopwatch import WARM_UP
from megajax.config.dump import to_yaml
from megajax.config.errors import UserError
from megajax.display.banner import plain
from megajax.display.text import count
from megajax.layers.attention.config import AttentionConfig
from megajax.layers.mlp.config import DenseMLPConfig, GatedMLPConfig
from megajax.layers.position.config import RopeConfig
from megajax.optim.config import AdamWConfig
from megajax.training.run_config import RunConfig

TOLERANCES = {"float32": (1e-4, 1e-4), "bfloat16": (2e-3, 2e-2), "float16": (2e-3, 2e-2)}
"""Compute dtype -> largest difference of the first loss, and of the losses after updates. The first loss is a mean over
many tokens, in which rounding errors cancel. Adam's first updates are the sign of the gradient, which rounding flips
where a gradient is near 0."""


def peers(
    *,
    cfg: RunConfig,
    steps: int = 20,
    torch_python: Path = Path(sys.executable),
    torch_seconds: float = 240.0,
    peak_tflops: float | None = None,
) -> dict[str, Any]:
    """The same model and batch in PyTorch on the same device: ratios of speed and memory.

    The PyTorch baseline (training/torch_baseline.py) has torch.compile, fused attention and fused AdamW; the fastest of
    its variants counts. It starts from the weights of MegaJAX. To ensure equal work, the losses of the first five steps
    must agree within TOLERANCES; otherwise the exit code is 1. Each trainer runs in a process of its own, one after the
    other, on one device. --steps: timed steps of each, after five untimed ones. --torch-python: the Python that has
    torch. --torch-seconds: no variant is started after this time, and the baseline is ended after twice this time;
    variants measured by then count. --peak-tflops: as for mfu, which measures MegaJAX.

    Raises UserError for a config that the baseline does not support, and if there is no torch.
    """
    shape = spec_of(cfg)
    demand_torch(torch_python)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        peak = [] if peak_tflops is None else [f"--peak-tflops={peak_tflops}"]
        own_figures = measure_ours(cfg, folder, f"--steps={steps}", *peak)
        spec = shape | {
            "learning_rates": own_figures["learning_rates"],
            "microbatches": own_figures["run"]["microbatches"],
            "timed_steps": steps,
            "seconds": torch_seconds,
            "warm_up": WARM_UP,
        }
        (folder / "spec.json").write_text(json.dumps(spec))
        paths = [folder / name for name in ("spec.json", "start.npz", "torch.json")]
        program = [str(torch_python), "-m", "benchmarks.training.torch_baseline", *map(str, paths)]
        theirs = measure_torch(program, paths[-1], torch_environment(), 2 * torch_seconds)
    figures = compared(own_figures, theirs, cfg.precision.compute)
    print(report(figures))
    return figures | {"wrong": not figures["equal_work"]}


def spec_of(cfg: RunConfig) -> dict[str, Any]:
    """What the baseline needs to know of a config. Raises UserError for a config that it does not support."""
    model, optimizer = cfg.model, cfg.optimizer
    block = model.stack.pattern[0]
    mixer, mlp, rope = block.mixer, block.mlp, getattr(block.mixer, "rope", None)
    plain_attention = AttentionConfig(
        heads=getattr(mixer, "heads", 1),
        kv_heads=getattr(mixer, "kv_heads", None),
        head_dim=mixer.head_dim if isinstance(mixer, AttentionConfig) else None,
        bias=getattr(mixer, "bias", False),
        rope=rope,
        kernel=mixer.kernel,
    )
    plain_mlps = [DenseMLPConfig(ffn=mlp.ffn, activation="gelu_tanh", bias=bias) for bias in (True, False)]
    adam = ("beta1", "beta2", "epsilon", "weight_decay", "clip")
    unsupported = {
        "model.stack.pattern": len(model.stack.pattern) > 1,
        "model.stack.pattern.0.mixer": mixer != plain_attention,
        "model.stack.pattern.0.mixer.rope": rope is not None and rope != RopeConfig(base=rope.base),
        "model.stack.pattern.0.mlp": mlp not in (GatedMLPConfig(ffn=mlp.ffn), *plain_mlps),
        "model.stack.pattern.0.norm": block.norm != model.norm or getattr(model.norm, "zero_centred", True),
        "model": bool(model.prediction or model.width_scaling or model.has_dropout()),
        "optimizer": type(optimizer) is not AdamWConfig
        or optimizer != AdamWConfig(**{name: getattr(optimizer, name) for name in adam}),
        "data.isolate_documents": "segment_ids" in cfg.data.leaves(),
        "batch": cfg.batch.ramp is not None or cfg.batch.loss_average != "tokens",
        "parallel": cfg.parallel.without_data() > 1,
        "precision": cfg.precision.gradients != "float32" or cfg.precision.matmul is not None,
    }
    if any(unsupported.values()):
        raise UserError(
            f"the torch baseline does not support {', '.join(name for name, applies in unsupported.items() if applies)}"
            " of this config.\nIt supports GPT and Llama: plain or grouped attention, one kind of block, no dropout, "
            "AdamW, one device: --config=bench.py:llama_1b"
        )
    return {
        "layers": model.stack.layers(),
        "heads": mixer.heads,
        "kv_heads": mixer.groups(),
        "head_dim": mixer.size(model.hidden),
        "gated": isinstance(mlp, GatedMLPConfig),
        "epsilon": model.norm.epsilon,
        "rope_base": None if rope is None else rope.base,
        "length": model.sequence_length,
        "vocabulary": model.vocabulary_size,
        "compute": cfg.precision.compute,
        "micro_size": cfg.batch.micro_size,
        **optimizer_of(cfg),
    }


def optimizer_of(cfg: RunConfig) -> dict[str, Any]:
    """The settings of AdamW."""
    optimizer = cfg.optimizer
    return {
        "betas": [optimizer.beta1, optimizer.beta2],
        "adam_epsilon": optimizer.epsilon,
        "weight_decay": optimizer.weight_decay,
        "clip": optimizer.clip,
    }


def demand_torch(python: Path) -> None:
    """Raises UserError if that Python has no torch."""
    code = "import importlib.util as u, sys; sys.exit(any(u.find_spec(name) is None for name in ('torch', 'numpy')))"
    try:
        installed = subprocess.run([str(python), "-c", code], check=False).returncode == 0
    except OSError as error:
        raise UserError(f"--torch-python={python} can't be started: {error.strerror}") from error
    if not installed:
        raise UserError(
            f"torch: not installed for {python}. Install torch and numpy there, or give --torch-python=FILE"
        )


def measure_ours(cfg: RunConfig, folder: Path, *flags: str) -> dict[str, Any]:
    """Figures of `mfu` in its own process, which leaves start.npz in the folder. Raises UserError if it fails."""
    config, file = folder / "config.yaml", folder / "ours.json"
    config.write_text(to_yaml(cfg))
    words = [f"--config={config}", f"--json={file}", f"--export={folder / 'start.npz'}", *flags]
    run([sys.executable, "-m", "benchmarks", "mfu", *words], "MegaJAX", environment=dict(os.environ))
    return json.loads(file.read_text())["figures"]


def measure_torch(program: list[str], file: Path, environment: dict[str, str], seconds: float) -> dict[str, Any]:
    """The baseline's figures. If it was ended or failed before its last variant, "ended" says how.

    Raises UserError if it did not start.
    """
    try:
        run(program, "the torch baseline", environment=environment, seconds=seconds)
    except UserError as error:
        if not file.is_file():
            raise
        return json.loads(file.read_text()) | {"ended": str(error)}
    return json.loads(file.read_text())


def run(program: list[str], name: str, *, environment: dict[str, str], seconds: float | None = None) -> None:
    """Run one trainer with its output shown. Raises UserError if it fails or takes too long."""
    print(f"== {name}", flush=True)
    try:
        code = subprocess.run(program, check=False, env=environment, timeout=seconds, cwd=ROOT).returncode
    except subprocess.TimeoutExpired as error:
        raise UserError(f"{name} was stopped after {seconds:g} s") from error
    if code:
        raise UserError(f"{name} ended with code {code}")


def torch_environment() -> dict[str, str]:
    """If jax runs on CPU, the baseline sees no GPU either, and its idle threads do not spin on shared cores. On a GPU,
    its allocator may extend segments, so that fragmentation does not cost memory."""
    on_cpu = os.environ.get("JAX_PLATFORMS") == "cpu"
    hidden = {"CUDA_VISIBLE_DEVICES": "", "OMP_WAIT_POLICY": "PASSIVE"} if on_cpu else {}
    return {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", **hidden}


def compared(own: dict[str, Any], theirs: dict[str, Any], compute: str) -> dict[str, Any]:
    """The figures of both, their ratios, and whether they did equal work."""
    finished = [variant for variant in theirs["variants"] if "losses" in variant]
    equal = [variant for variant in finished if agree(own["losses"], variant["losses"], compute)]
    best = max(equal, key=lambda variant: variant["tokens_per_second"]["median"], default=None)
    speed, most = own["tokens_per_second_per_device"]["median"], own["memory"]["peak_in_use"]
    ratios: dict[str, float | None] = {"tokens_per_second": None, "peak_memory": None}
    if best is not None:
        ratios["tokens_per_second"] = speed / best["tokens_per_second"]["median"]
        ratios["peak_memory"] = None if None in (most, best["peak_memory"]) else most / best["peak_memory"]
    return {
        "ours_over_torch": ratios,
        "equal_work": bool(finished) and len(equal) == len(finished),
        "tolerances": dict(zip(("first_loss", "later_losses"), TOLERANCES[compute], strict=True)),
        "ours": own,
        "torch_best": best,
        "torch": theirs,
    }


def agree(own: list[float], theirs: list[float], compute: str) -> bool:
    """Whether the losses of the first steps agree within TOLERANCES."""
    first, tolerance = TOLERANCES[compute]
    gaps = [abs(own_loss - peer_loss) for own_loss, peer_loss in zip(own, theirs, strict=True)]
    return gaps[0] <= first and all(gap <= tolerance for gap in gaps)


def report(figures: dict[str, Any]) -> str:
    """The comparison as text."""
    own, theirs, ratios = figures["ours"], figures["torch"], figures["ours_over_torch"]
    rows = [("MegaJAX", _row(own["tokens_per_second_per_device"], own["memory"]["peak_in_use"], own["losses"]))]
    for measurement in theirs["variants"]:
        variant = measurement["variant"]
        compiled = "eager" if variant["compile"] == "none" else f"compiled {variant['compile']}"
        name = f"torch, {variant['attention']} attention, {compiled}, {variant['loss']} loss"
        name += ", recomputed" if variant["recompute"] else ""
        if "error" in measurement:
            rows.append((name, measurement["error"]))
            continue
        row = _row(measurement["tokens_per_second"], measurement["peak_memory"], measurement["losses"])
        rows.append((name, row))
    if "ended" in theirs:
        rows.append(("torch", theirs["ended"]))
    first, tolerance = figures["tolerances"].values()
    verdict = "yes" if figures["equal_work"] else "NO: the losses differ, and the ratios mean nothing"
    if not any("losses" in measurement for measurement in theirs["variants"]):
        verdict = "nothing to compare: no variant of torch was measured"
    speed, most = (ratios[name] for name in ("tokens_per_second", "peak_memory"))
    equal = [
        ("equal work", f"{verdict} (first loss within {first:g}, {WARM_UP - 1} later ones within {tolerance:g})"),
        ("tokens/s", "none" if speed is None else f"{speed:.3f} times the fastest of torch"),
        ("peak memory", "not available" if most is None else f"{most:.3f} times that of the fastest of torch"),
    ]
    versions = theirs["versions"]
    title = f"{own['device']}, torch {versions['torch']}, cuDNN {versions['cudnn']}"
    return plain(title, [("tokens/s, peak memory, first losses", rows), ("MegaJAX over torch", equal)])


def _row(speed: dict[str, float], most: int | None, losses: list[float]) -> str:
    text = f"{count(speed['median'])} ({count(speed['p10'])} to {count(speed['p90'])})"
    memory = "" if most is None else f", {most / 2**30:.2f} GiB"
    return f"{text}{memory}, {' '.join(f'{loss:.4f}' for loss in losses)}"
