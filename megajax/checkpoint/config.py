"""Settings of saving, keeping and loading checkpoints."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from megajax.config.bounds import Bounds, Count, Index
from megajax.config.class_references import Builds
from megajax.config.errors import Problem
from megajax.config.paths_and_store_urls import StoredPath, format_prefix, store_url


@dataclass(frozen=True, kw_only=True)
class LocalConfig(Builds):
    """Checkpoints that each process writes to a folder of its machine, between those in the shared folder.

    `build(folder)` gives the `LocalCheckpoints` of the run whose shared checkpoints folder is given.

    Example: `mj.CheckpointConfig(every=1000, local=mj.LocalConfig(every=50, folder="/local/run"))`
    """

    target: ClassVar[str] = "megajax.checkpoint.local.local_checkpoints:LocalCheckpoints"

    every: Count
    """Steps between local checkpoints. A step that is saved to the shared folder is not saved locally."""
    folder: Path
    """A folder of the machine: on a local disk, or below /dev/shm for host memory. Processes of a machine share it."""
    replicas: Index = 0
    """How many other processes keep a copy of a process's shards, so that they survive the loss of its machine."""
    jump: Count | None = None
    """Process k keeps copies of the shards of process k + jump; none: the number of processes of a machine, so that
    the copies are on another machine."""
    keep: Count = 2
    """How many of the newest local checkpoints to keep. Writing one needs space for one more."""
    failures: Count = 3
    """After this many failed local checkpoints in a row, the attempt saves no more of them; training continues."""


@dataclass(frozen=True, kw_only=True)
class WeightsConfig:
    """Weights of another run to start from.

    Example: `mj.CheckpointConfig(weights=(mj.WeightsConfig(run="runs/bert_base", fresh=("head.*",)),))`
    """

    run: StoredPath
    """A run folder, its checkpoints folder or one step in it, in an object store too; or hf:DIR, a Hugging Face model
    folder."""
    into: str = ""
    """Path of the part of this model that receives the weights, such as a tower; empty: the whole model."""
    fresh: tuple[str, ...] = ()
    """Patterns of paths of weights to initialize randomly, with * for any text: head.* for other classes."""
    new_tokens: Literal["drawn", "mean"] | None = None
    """Embeddings of tokens that the other model lacks: drawn (initialized randomly) or mean (the mean of the others);
    none: another number of tokens is an error."""
    changed: tuple[str, ...] = ()
    """Patterns of settings that may differ from the config.json of hf:DIR, with * for any text, such as *.rope.base;
    other differences are errors."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Builds):
    """Saving, keeping and loading of checkpoints; `build(folder)` returns the `CheckpointManager` of a folder.

    Example: `mj.CheckpointConfig(every=500, keep_last=2)`
    """

    target: ClassVar[str] = "megajax.checkpoint.checkpoint_manager:CheckpointManager"

    store: StoredPath | None = None
    """Save to this place in an object store, s3://BUCKET/PREFIX or gs://BUCKET/PREFIX, and not to the run folder, whose
    other files are copied there."""
    every: Annotated[int, Bounds(at_least=1, hint="use none to save only at the end")] | None = 1000
    """Steps between checkpoints; none: only at the end and when the run is asked to stop."""
    keep_last: Annotated[int, Bounds(at_least=1, hint="use none to keep all")] | None = 3
    """Number of newest checkpoints to keep; none: all."""
    keep_every: Annotated[int, Bounds(at_least=1, hint="use none to keep no step for good")] | None = None
    """Never delete checkpoints of steps that are a multiple of this; none: no such checkpoints."""
    asynchronous: bool = True
    """Write in the background: training waits only for the copy to host memory."""
    at_end: bool = True
    """Write a checkpoint after the last step."""
    retries: Annotated[int, Bounds(at_least=0, hint="use 0 for no retries")] = 2
    """Number of retries of a failed save, between steps, before it counts as failed."""
    retry_seconds: Annotated[float, Bounds(at_least=0, hint="use 0 to retry at once")] = 10.0
    """Seconds from a failed save to its first retry; doubled for each further retry."""
    failed_saves: Annotated[int, Bounds(at_least=1, hint="use none to ignore failed saves")] | None = 2
    """Exit with code 1 after this many failed saves in a row, each with its retries; none: train on to the end."""
    load: StoredPath | None = None
    """Start from another run's state: its run folder, its checkpoints folder or one step in it, in an object store too;
    or from the weights of hf:DIR, a Hugging Face model folder.
    Ignored by a run with checkpoints of its own, which resumes from its newest one."""
    parts: Literal["all", "weights"] = "all"
    """Parts of `load` to use. weights: start with a fresh optimizer, schedule and order of rows, like
    checkpoint.weights."""
    weights: tuple[WeightsConfig, ...] = ()
    """Start from weights of other runs, with a fresh optimizer, schedule and order of rows, as for fine-tuning.
    Ignored by a run with checkpoints of its own. On the command line: --checkpoint.weights='[{run: runs/a}]'."""
    ignore: tuple[str, ...] = ()
    """Unknown settings in config.json of hf:DIR that are accepted, with * for any text, such as text_config.note; other
    unknown settings are errors."""
    changed_data: Literal["refuse", "accept"] = "refuse"
    """What to do if the contents of data files or settings of `data` have changed when the run resumes: refuse, or
    accept, and compare with the new data from then on. The run continues at the next row of the new data."""
    step: Annotated[int, Bounds(at_least=0, hint="use none for the newest")] | None = None
    """The step to start from, in `load` or else in the run's own folder; none: the newest intact one.
    Going back in the run's own folder sets later steps aside."""

    local: LocalConfig | None = None
    """Checkpoints on local disks or in host memory, saved between those in the shared folder; none: turned off."""

    def sources(self) -> tuple[WeightsConfig, ...]:
        """The sources of weights of a fresh run."""
        if self.load is not None and (self.parts == "weights" or format_prefix(self.load)):
            return (WeightsConfig(run=self.load),)
        return self.weights

    def state_source(self) -> Path | None:
        """The run from which a fresh run loads its full state."""
        return None if self.sources() else self.load

    def problems(self) -> list[Problem]:
        """Problems of the settings themselves; the manager checks the folders."""
        problems = []
        if self.store is not None and store_url(self.store) is None:
            message = f"is {self.store}, which is not s3://BUCKET/PREFIX or gs://BUCKET/PREFIX"
            problems.append(Problem("store", message, "use none for the run folder"))
        if self.load is not None and self.weights:
            message = "names sources of weights, and so does load"
            problems.append(Problem("weights", message, "set only one of the two"))
        if self.load is not None and self.sources() and self.step is not None:
            message = f"is {self.step}, but only weights are loaded, from load"
            problems.append(Problem("step", message, "set load to one step, such as runs/a/checkpoints/00000100"))
        if self.load is None and self.parts == "weights":
            problems.append(Problem("parts", "is weights, but load is none", "set load"))
        if self.every is not None and self.keep_every is not None and self.keep_every % self.every:
            message = f"is {self.keep_every}, which is not a multiple of every = {self.every}"
            problems.append(Problem("keep_every", message, "only steps that are saved can be kept"))
        return problems
