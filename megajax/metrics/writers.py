"""Writers of records and events: files of the run folder, TensorBoard, Weights & Biases.

Writers get plain numbers, already fetched from the devices, so that no writer waits for a step.
"""

import os
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megajax.config.optional_packages import require
from megajax.metrics.config import LoggingConfig, WandbConfig
from megajax.metrics.event_log import Clock
from megajax.metrics.line_file import LineFile
from megajax.metrics.prometheus_and_opentelemetry import TelemetryWriter
from megajax.metrics.record import METRICS, EvaluationRecord, Record, StepRecord, to_json
from megajax.metrics.run_folder import RunFolder, write_atomically
from megajax.metrics.writer import Writer, Writers
from megajax.storage.disk import open_regular


class JsonlWriter(Writer):
    """metrics.jsonl: a line for every step and every evaluation, written immediately.

    A run that resumes after `start_step` steps repeats the later ones. Their old lines are moved to
    metrics.superseded.jsonl, so that metrics.jsonl has every step once. Every line ends with the number of its attempt
    and the time.
    """

    def __init__(self, path: Path, *, start_step: int = 0, attempt: int = 1, clock: Clock | None = None):
        self._attempt, self._clock = attempt, clock or Clock()
        self.superseded = 0
        """Number of lines moved when the file was opened."""
        self._evaluated: set[str] = set()
        self._start_step = start_step
        if path.exists():
            self._rewind(path)
        self._file = LineFile(path)

    def _rewind(self, path: Path) -> None:
        """Atomically remove incomplete lines and those after the starting step."""
        earlier_lines, later_lines = [], []
        for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
            values = METRICS.parse(line)
            if values is not None:
                (later_lines if values["step"] > self._start_step else earlier_lines).append(line + "\n")
                if values["step"] == self._start_step and "split" in values:
                    self._evaluated.add(values["split"])
        if later_lines:
            with open(
                open_regular(path.with_name(f"{path.stem}.superseded.jsonl"), append=True), "a", encoding="utf-8"
            ) as aside:
                aside.writelines(later_lines)
                aside.flush()
                os.fsync(aside.fileno())
        write_atomically(path, "".join(earlier_lines))
        self.superseded = len(later_lines)

    def log(self, record: Record) -> None:
        # The evaluation of the initial state may be in the file already.
        if isinstance(record, EvaluationRecord) and record.step == self._start_step:
            if record.split in self._evaluated:
                return
            self._evaluated.add(record.split)
        self.write({**record.line(), "attempt": self._attempt, **self._clock.now()})

    def write(self, line: Mapping[str, Any]) -> None:
        """Write a line; on a full disk it waits until there is space. Raises FileDeleted."""
        self._file.write(to_json(line))
        self._file.demand_path()

    def close(self) -> None:
        self._file.close()


class LayersWriter(Writer):
    """layers.jsonl: lists per layer in detailed steps, as JsonlWriter; the file is created with the first line."""

    def __init__(self, path: Path, *, start_step: int = 0):
        self._path, self._start_step = path, start_step
        self._lines = JsonlWriter(path, start_step=start_step) if path.exists() else None

    def log(self, record: Record) -> None:
        line = record.lists() if isinstance(record, StepRecord) and record.detailed else {}
        if not line:
            return
        if self._lines is None:
            self._lines = JsonlWriter(self._path, start_step=self._start_step)
        self._lines.write(line)

    def close(self) -> None:
        if self._lines is not None:
            self._lines.close()


class EventsWriter(Writer):
    """events.jsonl: the events of all attempts of a run. See Clock for `time` and `clock`."""

    def __init__(self, path: Path, *, attempt: int = 1, clock: Clock | None = None):
        self._file, self._attempt = LineFile(path), attempt
        self._clock = clock or Clock()

    def event(self, name: str, /, **fields: object) -> None:
        if "event" in fields:
            raise ValueError(f"event {name!r} has a field 'event', which holds the event's name; rename the field")
        self._file.write(to_json({**self._clock.now(), "event": name, "attempt": self._attempt, **fields}))

    def close(self) -> None:
        self._file.close()


def scalars(record: Record) -> dict[str, float]:
    """The numbers of a record under dashboard names: train/loss, validation/perplexity."""
    line = record.line()
    prefix, layers = line.pop("split", "train"), line.pop("by_layer", {})
    if isinstance(record, StepRecord) and record.detailed:
        numbers = layers.pop("layers", ())
        for name, values in layers.items():
            line |= {f"{name}/layer_{layer}": value for layer, value in zip(numbers, values, strict=True)}
    return {
        f"{prefix}/{name}": float(value)
        for name, value in line.items()
        if name not in ("step", "loss_hex") and value is not None
    }


class TensorBoardWriter(Writer):
    """TensorBoard event files in `folder`; TensorBoard hides points of earlier attempts after `start_step`."""

    def __init__(self, folder: Path, *, start_step: int = 0):
        tensorboard = require("tensorboardX", "logging.tensorboard", otherwise="turn logging.tensorboard off")
        purge_step = start_step + 1 if folder.exists() else None
        # The suffix keeps the files of two attempts within the same second apart.
        suffix = f".{start_step}.{os.getpid()}.{time.monotonic_ns()}"
        self._file = tensorboard.SummaryWriter(logdir=str(folder), purge_step=purge_step, filename_suffix=suffix)

    def log(self, record: Record) -> None:
        for name, value in scalars(record).items():
            self._file.add_scalar(name, value, record.step)

    def close(self) -> None:
        self._file.close()


class WandbWriter(Writer):
    """A Weights & Biases run with its files in `folder`/wandb; later attempts resume it."""

    def __init__(self, config: WandbConfig, folder: Path, *, run_config: Mapping[str, Any] | None = None):
        wandb = require("wandb", "logging.wandb", otherwise="turn logging.wandb off")
        self._run = wandb.init(
            project=config.project,
            name=config.name or folder.resolve().name,
            id=_run_id(folder),
            resume="allow",
            mode=config.mode,
            dir=str(folder),
            config=None if run_config is None else dict(run_config),
            # Capturing stdout would break the console's lines that update in place.
            settings=wandb.Settings(console="off", silent=True),
        )
        # A separate x-axis: wandb's built-in step rejects an evaluation logged after a later step.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, record: Record) -> None:
        self._run.log({"step": record.step, **scalars(record)})

    def close(self) -> None:
        self._run.finish()


def _run_id(folder: Path) -> str:
    """The run's wandb ID, saved in the run folder for later attempts."""
    path = folder / "wandb" / "megajax-run-id"
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        write_atomically(path, uuid.uuid4().hex[:16])
    return path.read_text(encoding="utf-8").strip()


def open_writers(
    config: LoggingConfig,
    folder: RunFolder,
    *,
    start_step: int = 0,
    attempt: int = 1,
    primary: bool = True,
    run_config: Mapping[str, Any] | None = None,
) -> Writers:
    """The writers that `config` enables, in `folder`; none unless `primary`.

    start_step: step of the restored checkpoint, 0 for a new run. attempt: number of the attempt. run_config: shown in
    dashboards.
    Raises UserError if a package of an extra is missing, before any file is written.
    """
    if not primary:
        return Writers()
    dashboards: list[Writer] = []
    if config.tensorboard:
        dashboards.append(TensorBoardWriter(folder.tensorboard, start_step=start_step))
    if config.wandb is not None:
        dashboards.append(WandbWriter(config.wandb, folder.path, run_config=run_config))
    if config.telemetry is not None:
        dashboards.append(TelemetryWriter(config.telemetry, folder.path.resolve().name))
    events = EventsWriter(folder.events, attempt=attempt)
    metrics = JsonlWriter(folder.metrics, start_step=start_step, attempt=attempt)
    if metrics.superseded:
        events.event("metrics_superseded", start_step=start_step, lines=metrics.superseded)
    layers = LayersWriter(folder.layers, start_step=start_step)
    return Writers([metrics, layers, events, *dashboards])
