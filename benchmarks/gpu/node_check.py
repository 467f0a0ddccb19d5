"""Checks all devices of a node with whole runs of `megajax.train`.

Without a GPU the devices are virtual CPU devices. Does not import jax, so that the runs can use the whole GPUs.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu import comparison
from benchmarks.gpu.check import figures, gpu_name, written_by
from benchmarks.gpu.steps import BENCHMARKS, FOUR_LAYERS, Step, experts

DEVICES = 8
"""Devices of a node: virtual ones where there is no GPU. Predictions are for as many."""
STEPS = 5
TOLERANCE = 1e-4
"""Largest relative difference of losses and gradient norms over a short run."""
PATIENCE = 900.0
"""Maximum seconds of a run."""
SAVED_STEPS = 3
"""Steps before the run is stopped."""
ENDLESS = 100_000
"""Steps of the run that is stopped."""

TINY = (
    *("--model.stack.pattern.0.mixer.heads=8", "--model.stack.pattern.0.mixer.kv_heads=4", "--batch.global_size=16"),
    *("--precision.compute=float32", "--evaluation.every=none", "--evaluation.at_end=false", "--checkpoint.every=none"),
    *("--logging.every=1", "--logging.sample=false", "--logging.plot=false", "--logging.report=false"),
    *("--schedule.decay_steps=100", "--schedule.warmup_fraction=none", "--schedule.warmup_steps=1"),
    "--checkpoint.at_end=false",
)
QUICK = "--xla=xla_backend_optimization_level=0,xla_llvm_disable_expensive_passes=true"
"""Of virtual CPU devices: machine code without optimisations compiles in half the time."""
DENSE, EXPERTS = "llama3.py:debug", "qwen3_moe.py:debug"


class Layout(NamedTuple):
    """A layout. The remaining devices are data-parallel."""

    name: str
    sizes: Mapping[str, int]
    """Mesh axis -> size."""
    settings: tuple[str, ...] = ()
    config: str = DENSE
    rows: int = 8
    """Rows of a microbatch on all devices."""

    def fits(self, devices: int) -> bool:
        return devices % prod(self.sizes.values()) == 0

    def arguments(self, devices: int) -> list[str]:
        """Balancing losses are sums over microbatches, so layouts with experts have microbatches of the same rows."""
        groups = devices // prod(size for axis, size in self.sizes.items() if axis != "expert")
        parallel = [f"--parallel.{axis}={size}" for axis, size in self.sizes.items()]
        return [*parallel, *self.settings, f"--batch.micro_size={self.rows // groups}"]

    @property
    def reference(self) -> "Layout":
        """The same model on one device."""
        return Layout(f"one-{self.config.partition('.')[0]}", {}, (), self.config)

    @property
    def speed(self) -> Step:
        """Its step in bfloat16 at the sizes of a real model, in one process."""
        return Step(
            name=f"speed-{self.name}",
            kind="mfu",
            limit=int(PATIENCE),
            program=(*BENCHMARKS, "mfu", "--json={json}", *self.arguments(DEVICES)),
            real=(*REAL[self.config], "--batch.global_size=32", "--steps=6"),
            tiny=(f"--config={self.config}", *TINY, QUICK, "--steps=2", f"--devices=cpu:{DEVICES}"),
            devices=DEVICES,
        )


REAL = {DENSE: ("--config=bench.py:llama_1b",), EXPERTS: FOUR_LAYERS}
"""Config -> a model of the same kind with real sizes, which fits every layout on GPUs with 80 GB."""
FSDP, SEQUENCE = "--parallel.data_sharding=fsdp", "--parallel.sequence=true"
INTERLEAVED = ("--parallel.schedule=interleaved", "--parallel.virtual_stages=2")
PAIRS = "--batch.side_by_side=2"
LAYOUTS = (
    Layout("data", {}),
    Layout("fsdp", {}, (FSDP,)),
    Layout("tensor2-sequence", {"tensor": 2}, (SEQUENCE,)),
    Layout("tensor4-fsdp", {"tensor": 4}, (FSDP,)),
    Layout("fsdp-groups", {}, (FSDP, "--parallel.shards=2")),
    Layout("tensor2-pairs", {"tensor": 2}, (SEQUENCE, PAIRS)),
    Layout("pipeline2-1f1b", {"pipeline": 2}, ("--parallel.schedule=1f1b",)),
    Layout("pipeline2-tensor2-interleaved", {"pipeline": 2, "tensor": 2}, INTERLEAVED),
    # Pairs need two microbatches for each stage.
    Layout("pipeline2-tensor2-pairs", {"pipeline": 2, "tensor": 2}, (SEQUENCE, PAIRS), rows=4),
    Layout("context2-ring", {"context": 2}, ("--parallel.context_strategy=ring",)),
    Layout("context4-all_to_all", {"context": 4}, ("--parallel.context_strategy=all_to_all",)),
    Layout("expert4", {"expert": 4}, (), EXPERTS),
    Layout("expert2-tensor2-pipeline2", {"expert": 2, "tensor": 2, "pipeline": 2}, (), EXPERTS),
)
SPEEDS = tuple(layout.speed for layout in LAYOUTS)


@dataclass
class Node:
    """The devices of this machine, and the folder of the runs."""

    folder: Path
    gpus: int
    rows: list[dict[str, Any]] = field(default_factory=list)

    @property
    def devices(self) -> int:
        return self.gpus or DEVICES

    def command(self, layout: Layout, run: str, processes: int, *more: str) -> list[str]:
        """Train with all devices, or with one if `processes` is 0."""
        devices = self.devices // processes if processes else 1
        settings = (*TINY, *layout.arguments(devices * (processes or 1)), *more)
        train = [sys.executable, "-m", "megajax.train", f"--config={layout.config}", *settings]
        train += ["--num-processes=1"] * (processes < 2)
        train += [f"--run_dir={self.folder / run}", *([] if self.gpus else [f"--devices=cpu:{devices}", QUICK])]
        return launched(train, processes)

    @contextlib.contextmanager
    def started(self, command: Sequence[str], run: str, *, one_device: bool = False) -> Iterator[subprocess.Popen]:
        """The run, with its output in a file. It is killed with all its processes at the end of the block."""
        environment = {**os.environ} | ({"CUDA_VISIBLE_DEVICES": "0"} if one_device and self.gpus else {})
        with (self.folder / f"{run}.log").open("wb") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment, start_new_session=True
            )
        try:
            yield process
        finally:
            # The launcher's processes die with it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def train(self, layout: Layout, run: str, processes: int, *more: str, steps: int = STEPS) -> int:
        """Run training and return its exit code."""
        command = self.command(layout, run, processes, f"--steps={steps}", *more)
        return self.ended(command, run, one_device=processes == 0)

    def ended(self, command: Sequence[str], run: str, *, one_device: bool = False) -> int:
        """Run a program and return its exit code."""
        with self.started(command, run, one_device=one_device) as process:
            try:
                return process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                return 124

    def measure(self, step: Step, run: str, processes: int) -> tuple[int, Any]:
        """Run a step. Returns its exit code and its figures; None if it wrote none."""
        file = self.folder / f"{run}.json"
        command = step.command(sys.executable, {"json": str(file)}, tiny=not self.gpus)
        return self.ended(launched(command, processes), run), figures(written_by(step, file))

    def row(
        self, check: str, layout: str, processes: int, began: float, problem: str | None, error: float | None = None
    ) -> None:
        """Print and keep the result of a check. error: the largest relative difference from one device."""
        seconds = time.monotonic() - began
        difference = "" if error is None else f"{error:.1e}"
        state = "ok" if problem is None else f"FAILED: {problem}"
        print(f"{check:12} {layout:32} {processes:3} processes {seconds:6.1f} s  {difference:8} {state}", flush=True)
        self.rows.append(
            {"check": check, "layout": layout, "processes": processes, "seconds": round(seconds, 1)}
            | {"error": None if error is None else float(f"{error:.2e}"), "problem": problem}
        )

    def compare(self, check: str, layout: Layout, processes: int, run: str, reference: str, began: float) -> None:
        """Add the row of a run that ended with code 0."""
        error = largest_error(numbers(self.folder / run), numbers(self.folder / reference))
        problem = None if error <= TOLERANCE else f"above {TOLERANCE:g}; see {self.folder / run}.log"
        self.row(check, layout.name, processes, began, problem, error)


def launched(command: list[str], processes: int) -> list[str]:
    """The command in so many processes of this machine."""
    launch = [sys.executable, "-m", "megajax.launch", f"--processes={processes}", "--"]
    return [*launch, *command] if processes > 1 else command


def numbers(run: Path) -> dict[int, tuple[float, float]]:
    """Step -> (loss, gradient norm)."""
    path = run / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("}\n")]
    return {line["step"]: (line["loss"], line["grad_norm"]) for line in lines if "split" not in line}


def largest_error(actual: Mapping[int, tuple[float, float]], expected: Mapping[int, tuple[float, float]]) -> float:
    """The largest relative difference; infinite if a step is missing."""
    if not actual or not actual.keys() <= expected.keys():
        return float("inf")
    pairs = [pair for step in actual for pair in zip(actual[step], expected[step], strict=True)]
    return max(abs(a - b) / abs(b) for a, b in pairs)


def check_layouts(node: Node, layouts: Sequence[Layout], processes: Sequence[int]) -> None:
    """Every layout in one process and in one process per device."""
    for layout in layouts:
        for count in processes:
            run, began = f"{layout.name}-{count}", time.monotonic()
            if code := node.train(layout, run, count):
                node.row("layout", layout.name, count, began, f"exit code {code}; see {node.folder / run}.log")
            else:
                node.compare("layout", layout, count, run, layout.reference.name, began)


def check_dispatch(node: Node, processes: Sequence[int]) -> None:
    """Gradients by every way to dispatch tokens to experts, which are sharded over all devices."""
    for count in processes:
        run, began = f"experts-{count}", time.monotonic()
        code, found = node.measure(experts(node.devices // count), run, count)
        errors = [row["error"] for row in (found or {}).get("rows", []) if row["dtype"] == "float32"]
        problem = f"exit code {code}; see {node.folder / run}.log" if code or not errors else None
        node.row("gradients", f"expert{node.devices}", count, began, problem, max(errors, default=None))


def measure_speeds(node: Node, steps: Sequence[Step]) -> list[dict[str, Any]]:
    """Predicted and measured figures of train steps on layouts, for `comparison.table`."""
    predicted = comparison.predictions(gpu_name(), tiny=not node.gpus)
    compared = []
    for step in steps:
        began = time.monotonic()
        code, found = node.measure(step, step.name, 1)
        problem = f"exit code {code}; see {node.folder / step.name}.log" if code else None
        node.row("speed", step.name.removeprefix("speed-"), 1, began, problem)
        compared += comparison.rows(predicted, step.kind, step.name, found)
    return compared


def check_optional_features(node: Node, layout: Layout) -> None:
    """A profile, tests before the run, local checkpoints and comparisons of copies, one process per device."""
    run, began = "everything", time.monotonic()
    more = ("--profile.steps=3:4", "--resilience.health.before_run=true", "--resilience.replicas.every=2")
    more += ("--checkpoint.local.every=2", f"--checkpoint.local.folder={node.folder / 'local'}")
    code = node.train(layout, run, node.devices, *more)
    traces = list((node.folder / run / "profile").rglob("*.xplane.pb"))
    if code or len(traces) != 1:
        problem = f"exit code {code}, {len(traces)} traces instead of 1; see {node.folder / run}.log"
        node.row("everything", layout.name, node.devices, began, problem)
    else:
        node.compare("everything", layout, node.devices, run, layout.reference.name, began)


def check_stop_and_resume(node: Node, before: Layout, after: Layout) -> None:
    """SIGTERM to a run of one process per device, and its continuation on another layout by one process."""
    run, began = "stopped", time.monotonic()
    with node.started(node.command(before, run, node.devices, f"--steps={ENDLESS}"), run) as process:
        while process.poll() is None and time.monotonic() < began + PATIENCE:
            if len(numbers(node.folder / run)) >= SAVED_STEPS:
                process.send_signal(signal.SIGTERM)
                break
            time.sleep(0.1)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(PATIENCE)
        code = process.poll()
    saved = sorted(int(path.name) for path in (node.folder / run / "checkpoints").glob("*") if path.name.isdigit())
    if code != 0 or not saved:
        problem = f"exit code {code}, saved steps {saved}; see {node.folder / run}.log"
        node.row("SIGTERM", before.name, node.devices, began, problem)
        return
    node.row("SIGTERM", before.name, node.devices, began, None)
    began, steps, reference = time.monotonic(), saved[-1] + STEPS, "one-longer"
    # The same number of steps in the settings, because the order of the rows depends on it.
    code = node.train(before.reference, reference, 0, f"--resilience.exit_after_steps={steps}", steps=ENDLESS)
    code = code or node.train(after, run, 1, f"--resilience.exit_after_steps={STEPS}", steps=ENDLESS)
    if code or len(numbers(node.folder / run)) != steps:
        problem = f"exit code {code}, {len(numbers(node.folder / run))} of {steps} steps; see {node.folder / run}.log"
        node.row("resume", f"{before.name} to {after.name}", 1, began, problem)
    else:
        node.compare("resume", after, 1, run, reference, began)


def visible_gpus() -> int:
    """GPUs of this machine, by the driver."""
    if shutil.which("nvidia-smi") is None:
        return 0
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines()) if listed.returncode == 0 else 0


def node_check(*, only: str = "", processes: int | None = None) -> dict[str, Any]:
    """Checks of all devices of a node with whole runs of training; node_check.sh runs it and sets OUT.

    Each layout trains 5 steps in float32, in one process that drives all devices and in one process per device. Losses
    and gradient norms are compared with those of one device. Then, with one process per device: a run with a profile,
    tests before the run, local checkpoints and comparisons of copies; a run that SIGTERM stops; and the same run
    resumed on another layout by one process, compared with one device that never stopped. Gradients by every way to
    dispatch tokens to experts are compared. On eight devices, the step of each layout is timed at the sizes of a real
    model (on CPU devices: tiny sizes), and printed beside its prediction with its range. --only: layouts whose names
    contain this, or the run with a profile (`everything`), the stopped one (`stop`), the gradients (`experts`), or the
    speeds (`speed-` and the name of a layout). --processes: 1, or the number of devices; by default both.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the runs too
    folder = Path(os.environ["OUT"]) / "runs"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    node = Node(folder, visible_gpus())
    kind = f"{node.gpus} GPUs" if node.gpus else f"{DEVICES} virtual CPU devices"
    print(f"node_check: {kind}, tolerance {TOLERANCE:g}, logs in {folder}", flush=True)
    layouts = [layout for layout in LAYOUTS if layout.fits(node.devices) and only in layout.name]
    counts = [processes] if processes else sorted({1, node.devices})
    speeds = [step for step in SPEEDS if node.devices == step.devices and only in step.name]
    for reference in {layout.reference.name: layout.reference for layout in (LAYOUTS[0], *layouts)}.values():
        began = time.monotonic()
        code = node.train(reference, reference.name, 0)
        node.row("one device", reference.config, 1, began, f"exit code {code}" if code else None)
    check_layouts(node, layouts, counts)
    if node.devices > 1 and only in "experts":
        check_dispatch(node, counts)
    if node.devices > 1 and only in "everything":
        check_optional_features(node, LAYOUTS[0])
    if node.devices > 1 and only in "stop":
        check_stop_and_resume(node, LAYOUTS[2], LAYOUTS[1])
    compared = measure_speeds(node, speeds)
    if compared:
        print(f"{comparison.heading(tiny=not node.gpus)}\n{comparison.table(compared)}", flush=True)
    failed = sum(row["problem"] is not None for row in node.rows)
    print(f"node_check: {len(node.rows) - failed} of {len(node.rows)} checks passed", flush=True)
    return {"devices": kind, "rows": node.rows, "comparison": compared, "wrong": failed}
