"""Trains the same model and batch with MegaJAX and with other trainers on this GPU: ratios of speed and memory.

Run:  python benchmarks/peers.py --config=FILE[:function] [--setting=value ...] [--steps=N] [--json[=FILE]]

  --steps=N              timed steps of each trainer, after five untimed ones (default 20)
  --json[=FILE]          also write JSON; the default file is benchmarks/results/peers_NAME.json
  --torch-python=FILE    the Python that has torch (default: this one)
  --torch-seconds=N      start no further variant of the baseline after this time (default 240), and end it after twice
                         this time; variants measured by then count
  --megatron=DIR         a checkout of Megatron-LM; its pretrain_gpt.py runs with the Python of --torch-python
  --peak-tflops=N        as for benchmarks/mfu.py, which measures MegaJAX
  --devices=cpu          on CPU

The PyTorch baseline is benchmarks/torch_baseline.py, with torch.compile, fused attention and fused AdamW. The fastest
of its variants counts. It starts from the weights of MegaJAX. To ensure equal work, the losses of the first five steps
must agree within TOLERANCES; otherwise the exit code is 1. Each trainer runs in a separate process, one after the
other. Only one device is used, because several would compare layouts. Megatron-LM starts from its own weights and uses
its own rows.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import megatron_peer
import outcome
from stopwatch import WARM_UP, Spread

from megajax.command_line.parser import Flag, front_door, parse
from megajax.config.errors import UserError
from megajax.display.banner import plain
from megajax.display.text import count
from megajax.layers.configs import AttentionConfig, DenseMLPConfig, GatedMLPConfig, LayerNormConfig, RopeConfig
from megajax.optim.config import AdamWConfig
from megajax.training.run_config import RunConfig

HERE = Path(__file__).parent
FLAGS = (
    Flag("steps", int, 20),
    Flag("json", None | bool | Path),
    Flag("torch-python", Path, Path(sys.executable)),
    Flag("torch-seconds", float, 240.0),
    Flag("megatron", Path | None),
    Flag("peak-tflops", float | None),
)
TOLERANCES = {"float32": (1e-4, 1e-4), "bfloat16": (2e-3, 2e-2), "float16": (2e-3, 2e-2)}
"""Compute dtype -> how far apart losses may be: that of the fresh weights, and those after updates. The first is a mean
over many tokens, in which roundings cancel. The update of Adam's first steps is the gradient's sign, which rounding
turns over where a gradient is near 0."""


def main(argv: list[str]) -> int:
    """Measure both, compare, print. Returns 1 where the losses differ or the baseline gave no figures.

    Raises:
        UserError: a config the baseline has no model for, or no torch.
    """
    if {"-h", "--help"} & set(argv):
        print(__doc__.strip())
        return 0
    command = parse(argv, verb="peers", flags=FLAGS)
    flags, cfg = command.flags, command.config
    shape = spec_of(cfg)
    demand_torch(flags["torch_python"])
    if flags["megatron"] is not None and not (flags["megatron"] / megatron_peer.SCRIPT).is_file():
        raise UserError(
            f"--megatron={flags['megatron']}: it has no {megatron_peer.SCRIPT}. Name a checkout of Megatron-LM"
        )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        own_figures = measure_ours(argv, folder)
        spec = shape | {
            "learning_rates": own_figures["learning_rates"],
            "microbatches": own_figures["run"]["microbatches"],
            "timed_steps": flags["steps"],
            "seconds": flags["torch_seconds"],
            "warm_up": WARM_UP,
        }
        (folder / "spec.json").write_text(json.dumps(spec))
        paths = [folder / name for name in ("spec.json", "start.npz", "torch.json")]
        program = [str(flags["torch_python"]), str(HERE / "torch_baseline.py"), *map(str, paths)]
        theirs = measure_torch(program, paths[-1], torch_environment(command.devices), 2 * flags["torch_seconds"])
        megatron = measure_megatron(spec, flags["megatron"], flags["torch_python"])
    figures = compared(own_figures, theirs, cfg.precision.compute) | {"megatron": megatron}
    print(report(figures))
    if flags["json"]:
        outcome.write_to(outcome.file_for("peers", flags["json"], argv), figures)
    return 0 if figures["equal_work"] else 1


def spec_of(cfg: RunConfig) -> dict[str, Any]:
    """What the baseline has to know of a config. Raises UserError for a model it can't be."""
    model, optimizer = cfg.model, cfg.optimizer
    block = model.stack.pattern[0]
    mixer, mlp, rope = block.mixer, block.mlp, getattr(block.mixer, "rope", None)
    plain_attention = AttentionConfig(
        heads=getattr(mixer, "heads", 1), kv_heads=getattr(mixer, "kv_heads", None), head_dim=mixer.head_dim
        if isinstance(mixer, AttentionConfig) else None, bias=getattr(mixer, "bias", False), rope=rope,
        kernel=mixer.kernel,
    )  # fmt: skip
    unfit = {
        "model.stack.pattern": len(model.stack.pattern) > 1,
        "model.stack.pattern.0.mixer": mixer != plain_attention,
        "model.stack.pattern.0.mixer.rope": rope is not None and rope != RopeConfig(base=rope.base),
        "model.stack.pattern.0.mlp": mlp not in _mlps(mlp.ffn),
        "model.stack.pattern.0.norm": block.norm != model.norm or getattr(model.norm, "zero_centred", True),
        "model": bool(model.prediction or model.width_scaling or model.has_dropout()),
        "optimizer": type(optimizer) is not AdamWConfig or optimizer != _adam(optimizer),
        "data.isolate_documents": "segment_ids" in cfg.data.leaves(),
        "batch": cfg.batch.ramp is not None or cfg.batch.loss_average != "tokens",
        "parallel": cfg.parallel.without_data() > 1,
        "precision": cfg.precision.gradients != "float32" or cfg.precision.fp8 is not None,
    }
    if any(unfit.values()):
        variants = ", ".join(name for name, unfit_reason in unfit.items() if unfit_reason)
        raise UserError(
            f"the torch baseline does not support {variants} of this config.\nIt supports GPT and Llama: "
            "plain or grouped attention, one kind of block, no dropout, AdamW, one device: --config=bench.py:llama_1b"
        )
    return {
        "layers": model.stack.layers(),
        "hidden": model.hidden,
        "ffn": mlp.ffn,
        "bias": mixer.bias,
        "tied": model.tied,
        "layer_norm": isinstance(model.norm, LayerNormConfig),
        "vocabulary_multiple": model.vocabulary_multiple,
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
        "betas": [optimizer.beta1, optimizer.beta2],
        "adam_epsilon": optimizer.epsilon,
        "weight_decay": optimizer.weight_decay,
        "clip": optimizer.clip,
    }


def _mlps(ffn: int) -> tuple[Any, ...]:
    return GatedMLPConfig(ffn=ffn), *(
        DenseMLPConfig(ffn=ffn, activation="gelu_tanh", bias=bias) for bias in (True, False)
    )


def _adam(cfg: AdamWConfig) -> AdamWConfig:
    """The same with everything else as by default."""
    return AdamWConfig(
        beta1=cfg.beta1, beta2=cfg.beta2, epsilon=cfg.epsilon, weight_decay=cfg.weight_decay, clip=cfg.clip
    )


def demand_torch(python: Path) -> None:
    """Raises UserError where that Python has no torch."""
    code = "import importlib.util as u, sys; sys.exit(any(u.find_spec(name) is None for name in ('torch', 'numpy')))"
    try:
        installed = subprocess.run([str(python), "-c", code], check=False).returncode == 0
    except OSError as error:
        raise UserError(f"--torch-python={python} can't be started: {error.strerror}") from error
    if not installed:
        raise UserError(
            f"torch: not installed for {python}. Install torch and numpy there, or give --torch-python=FILE"
        )


def measure_ours(argv: list[str], folder: Path) -> dict[str, Any]:
    """Figures of benchmarks/mfu.py, which leaves start.npz in the folder. Raises UserError where it fails."""
    # What only this program knows is left out; the rest is for mfu.py and for the config.
    own_flags = ("--json", "--megatron", "--torch-python", "--torch_python", "--torch-seconds", "--torch_seconds")
    passed = [word for word in argv if word.partition("=")[0] not in own_flags]
    file = folder / "ours.json"
    program = [sys.executable, str(HERE / "mfu.py"), *passed, f"--json={file}", f"--export={folder / 'start.npz'}"]
    run(program, "MegaJAX", environment=dict(os.environ))
    return json.loads(file.read_text())["figures"]


def measure_torch(program: list[str], file: Path, environment: dict[str, str], seconds: float) -> dict[str, Any]:
    """What the baseline wrote, also where it was ended or broke before its last variant: then "ended" says how.

    Raises UserError where it did not come as far as to begin.
    """
    try:
        run(program, "the torch baseline", environment=environment, seconds=seconds)
    except UserError as error:
        if not file.is_file():
            raise
        return json.loads(file.read_text()) | {"ended": str(error)}
    return json.loads(file.read_text())


def measure_megatron(spec: dict[str, Any], checkout: Path | None, python: Path) -> dict[str, Any] | None:
    """Its figures, or why there are none; None where no checkout was named."""
    if checkout is None:
        return None
    print("== Megatron-LM", flush=True)
    environment = {**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTHONPATH": str(checkout)}
    program = megatron_peer.command(spec, checkout, python)
    ended = subprocess.run(program, check=False, env=environment, capture_output=True, text=True, cwd=checkout)
    figures_of_log = megatron_peer.parse_log(ended.stdout + ended.stderr, spec)
    if "error" in figures_of_log:
        return figures_of_log
    tokens = spec["micro_size"] * spec["microbatches"] * spec["length"]
    return figures_of_log | {"tokens_per_second": Spread.of(figures_of_log.pop("seconds")).into(tokens).to_dict()}


def run(program: list[str], name: str, *, environment: dict[str, str], seconds: float | None = None) -> None:
    """Run one trainer, its output shown. Raises UserError where it fails, or is not through in time."""
    print(f"== {name}", flush=True)
    try:
        code = subprocess.run(program, check=False, env=environment, timeout=seconds).returncode
    except subprocess.TimeoutExpired as error:
        raise UserError(f"{name} was stopped after {seconds:g} s") from error
    if code:
        raise UserError(f"{name} ended with code {code}")


def torch_environment(devices: str | None) -> dict[str, str]:
    """With --devices=cpu the baseline sees no GPU either, and its threads don't spin where others want the cores. On a
    GPU its allocator may grow pieces, so as not to lose to gaps."""
    hidden = {"CUDA_VISIBLE_DEVICES": "", "OMP_WAIT_POLICY": "PASSIVE"} if (devices or "").startswith("cpu") else {}
    return {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", **hidden}


def compared(own: dict[str, Any], theirs: dict[str, Any], compute: str) -> dict[str, Any]:
    """Both, their ratios, and whether they did the same work."""
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
    """Whether losses of the first steps are the same work's."""
    first, tolerance = TOLERANCES[compute]
    gaps = [abs(own_loss - peer_loss) for own_loss, peer_loss in zip(own, theirs, strict=True)]
    return gaps[0] <= first and all(gap <= tolerance for gap in gaps)


def report(figures: dict[str, Any]) -> str:
    """The comparison as text."""
    own, theirs, ratios = figures["ours"], figures["torch"], figures["ours_over_torch"]
    rows = [("MegaJAX", _row(own["tokens_per_second_per_device"], own["memory"]["peak_in_use"], own["losses"]))]
    for measurement in theirs["variants"]:
        variant = measurement["variant"]
        name = f"torch, {variant['attention']} attention, compiled {variant['compile']}, {variant['loss']} loss"
        name += ", recomputed" if variant["recompute"] else ""
        if "error" in measurement:
            rows.append((name, measurement["error"]))
            continue
        row = _row(measurement["tokens_per_second"], measurement["peak_memory"], measurement["losses"])
        rows.append((name, row))
    if "ended" in theirs:
        rows.append(("torch", theirs["ended"]))
    megatron = figures["megatron"]
    if megatron is None:
        rows.append(("Megatron-LM", "not run: name a checkout with --megatron=DIR"))
    elif "error" in megatron:
        rows.append(("Megatron-LM", megatron["error"]))
    else:
        rows.append(("Megatron-LM", _row(megatron["tokens_per_second"], megatron["peak_memory"], megatron["losses"])))
        ratio = own["tokens_per_second_per_device"]["median"] / megatron["tokens_per_second"]["median"]
        rows.append(("MegaJAX over Megatron-LM", f"{ratio:.3f} times its tokens/s"))
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


if __name__ == "__main__":
    front_door(main)
