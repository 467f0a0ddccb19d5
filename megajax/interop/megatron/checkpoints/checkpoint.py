"""A checkpoint of Megatron-LM in either format: the arguments of its run, weights, and optimizer moments."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from megajax.checkpoint.weights.foreign import ForeignModel, ForeignWeights, declared_by, demand_fit
from megajax.checkpoint.weights.tensor_table import Mapped, resolved
from megajax.config.errors import UserError
from megajax.interop.megatron.checkpoints.archive import TorchArchive, memory_map
from megajax.interop.megatron.checkpoints.names import (
    WITHOUT_WEIGHTS,
    LazyTensor,
    NamedTensors,
    unstacked,
    without_padding,
)
from megajax.interop.megatron.checkpoints.pickles import Record, TensorPlace
from megajax.interop.megatron.checkpoints.ranks import (
    MASTER,
    MOMENTS,
    RANK,
    RankTensors,
    UnmappedError,
    rank_files,
    rank_moments,
    updates,
)
from megajax.interop.megatron.checkpoints.sharded import METADATA, ShardedFolder
from megajax.interop.megatron.checkpoints.tables import second_names, table
from megajax.layers.param import ParamSpec

TRACKER = "latest_checkpointed_iteration.txt"
COMMON = "common.pt"
MASTERS = (MASTER, "param")
"""Kinds of state that are float32 copies of weights; the second one is a distributed optimizer's."""
COMMON_OBJECT = "common_state/shard_0_1"
"""The object with the checkpoint's dict, which megatron-core 0.19 writes instead of common.pt."""
OPTIMIZER = re.compile(r"^(?:chained_\d+\.)?optimizer\.state\.(\w+?)\.(.*)$")
DROPPED = {
    "rng_state": "random number states: MegaJAX derives random numbers from seed and step",
    "rerun_state_machine": "the state of the re-run machinery",
    "opt_param_scheduler": "settings of the schedule; its count of samples is kept",
    "grad_scaler": "the loss scale, which starts anew",
}
"""Parts of a checkpoint that are not converted."""


class Contents(Protocol):
    """The interface of both formats. table: name -> tensor of the model."""

    @property
    def common(self) -> Mapping[str, Any]:
        """The checkpoint's dict without its weights."""
        ...

    def names(self) -> set[str]:
        """Names of the weights, as in tables."""
        ...

    def weights(self, table: Mapping[str, Mapped]) -> dict[str, LazyTensor]:
        """The weights by name; of a run in 16 bits, the float32 copies if the checkpoint has them."""
        ...

    def moments(self, table: Mapping[str, Mapped]) -> dict[str, dict[str, LazyTensor]]:
        """Kind -> name -> moment. Raises UnmappedError."""
        ...

    def view(self, place: TensorPlace) -> np.ndarray:
        """A tensor in `common`."""
        ...


class MegatronModel(NamedTuple):
    """A checkpoint whose tensors match its model."""

    foreign: ForeignModel
    table: Sequence[Mapped]
    weights: ForeignWeights
    moments: Mapping[str, ForeignWeights]
    """first_moment and second_moment, by the paths of the weights; empty if they can't be assigned to weights."""
    updates: int
    """Number of updates of the optimizer so far."""
    iteration: int
    consumed_samples: int
    scheduled_samples: int
    """Samples that the schedule of the learning rate has counted."""
    args: Mapping[str, Any]
    """The arguments of its run."""
    dropped: tuple[str, ...]
    """Parts of the checkpoint that are not converted."""

    @property
    def model(self) -> Any:
        """The model config."""
        return self.foreign.model


class MegatronCheckpoint:
    """One checkpoint of a folder. The constructor reads only metadata."""

    def __init__(self, folder: Path, step: int | None = None):
        """folder: with the tracker file, or of one iteration; step: the iteration; None: the newest.

        Raises UserError for a folder without a checkpoint, and for files that are damaged or refused.
        """
        self.folder = iteration_folder(folder, step)
        self.where = str(self.folder)
        self.contents: Contents = _Sharded(self.folder) if (self.folder / METADATA).is_file() else _Ranks(self.folder)
        args = self.contents.common.get("args")
        if not isinstance(args, Record):
            raise UserError(f"{self.where} has no args, which describe its model")
        self.args: Mapping[str, Any] = args.fields

    def script(self) -> str:
        """The script of Megatron-LM that trains such models."""
        names = self.contents.names()
        if "lm_head.dense.weight" in names:
            return "pretrain_bert.py"
        stacks = {name.partition(".")[0] for name in names} & {"encoder", "decoder"}
        return "pretrain_t5.py" if len(stacks) == 2 else "pretrain_gpt.py"

    def iteration(self) -> int:
        """Number of steps so far; 0 for a released model."""
        return _int(self.contents.common.get("iteration"))

    def read(self, model: Any) -> ForeignModel:
        """The checkpoint as a MegaJAX model. model: its config."""
        return self._read(model, resolved(table(model), declared_by(model)))

    def _read(self, model: Any, tensors: Sequence[Mapped]) -> ForeignModel:
        by_name = {tensor.name: tensor for tensor in tensors}
        parts = _padless(self.where, self.contents.weights(by_name), by_name)
        return ForeignModel(model=model, tensors=parts, rows=table(model), ignored=ignored(model))

    def open(self, model: Any) -> MegatronModel:
        """The model with its optimizer. Raises UserError with everything that does not match the model."""
        declared = declared_by(model)
        tensors = resolved(table(model), declared)
        foreign = self._read(model, tensors)
        demand_fit(foreign.tensors, tensors, foreign.ignored)
        moments, dropped = dict[str, ForeignWeights](), [text for key, text in DROPPED.items() if self._has(key)]
        try:
            moments = self._moments(tensors, declared, foreign.ignored)
        except UnmappedError as error:
            dropped.insert(0, f"the optimizer's state: {error}")
        iteration = self.iteration()
        consumed = _int(self.args.get("consumed_train_samples"))
        schedule = self.contents.common.get("opt_param_scheduler")
        return MegatronModel(
            foreign=foreign,
            table=tensors,
            weights=ForeignWeights(foreign.tensors, tensors, declared),
            moments=moments,
            updates=updates(self.contents.common.get("optimizer"), self.contents.view) or iteration,
            iteration=iteration,
            consumed_samples=consumed,
            scheduled_samples=_int(schedule.get("num_steps") if isinstance(schedule, dict) else None) or consumed,
            args=self.args,
            dropped=tuple(dropped),
        )

    def _moments(
        self, tensors: Sequence[Mapped], declared: Mapping[str, ParamSpec], ignored: Sequence[str]
    ) -> dict[str, ForeignWeights]:
        """Kind -> moments. Observations have none. Raises UnmappedError."""
        trained = {path: spec for path, spec in declared.items() if spec.updater is None}
        trained_tensors = [tensor for tensor in tensors if all(piece.path in trained for piece in tensor.pieces)]
        by_name, moments = {tensor.name: tensor for tensor in trained_tensors}, {}
        for kind, parts in self.contents.moments(by_name).items():
            padless = _padless(self.where, parts, by_name)
            demand_fit(padless, trained_tensors, ignored)
            moments[MOMENTS[kind]] = ForeignWeights(padless, trained_tensors, trained)
        return moments

    def _has(self, key: str) -> bool:
        inner = self.contents.common.get("optimizer")
        return key in self.contents.common or (isinstance(inner, dict) and key in inner)


def _padless(where: str, parts: Mapping[str, LazyTensor], table: Mapping[str, Mapped]) -> NamedTensors:
    tensors = {
        name: without_padding(name, part, table[name].shape()) if name in table else part
        for name, part in parts.items()
    }
    return NamedTensors(where, tensors)


def _int(value: Any) -> int:
    return value if isinstance(value, int) else 0


def ignored(model: Any) -> tuple[str, ...]:
    """Patterns of names of tensors that hold no weights, or copies: the last stage has a copy of a tied table."""
    tied = ("output_layer.weight", "lm_head.output_layer.weight") if model.tied else ()
    return (*WITHOUT_WEIGHTS, *tied, *second_names(model).values())


def iteration_folder(folder: Path, step: int | None = None) -> Path:
    """The folder of one checkpoint: the folder itself, or the one in it that `step` or the tracker file names.

    Raises UserError if there is none.
    """
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder")
    present = sorted(path.name for path in folder.iterdir() if re.fullmatch(r"iter_\d+|release", path.name))
    if step is None and not present and ((folder / METADATA).is_file() or any(_rank_folders(folder))):
        return folder
    listing = f"there are {', '.join(present)}" if present else "there are no folders iter_0000000 or release"
    if step is not None:
        name = f"iter_{step:07d}"
    else:
        try:
            text = (folder / TRACKER).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(
                f"{folder} is not a checkpoint of Megatron-LM: it has no {TRACKER}, and {listing}"
            ) from error
        name = f"iter_{int(text):07d}" if text.isascii() and text.isdigit() else text
    if name not in present:
        raise UserError(f"{folder} has no checkpoint {name!r}; {listing}")
    return folder / name


def _rank_folders(folder: Path) -> Iterator[Path]:
    return (path for path in folder.iterdir() if RANK.match(path.name))


class _Ranks:
    """The `torch` format."""

    def __init__(self, folder: Path):
        self._files = rank_files(folder)
        first = self._files[0].archive.content
        self.common = {key: value for key, value in first.items() if not str(key).startswith("model")}
        self._tensors = RankTensors(self._files, {file.rank: file.chunks() for file in self._files})

    def view(self, place: TensorPlace) -> np.ndarray:
        return self._files[0].archive.view(place)

    def names(self) -> set[str]:
        return set(self._tensors.pieces)

    def weights(self, table: Mapping[str, Mapped]) -> dict[str, LazyTensor]:
        weights = self._tensors.merged(table)
        try:
            return weights | self._states(table).get(MASTER, {})
        except UnmappedError:
            return weights

    def moments(self, table: Mapping[str, Mapped]) -> dict[str, dict[str, LazyTensor]]:
        return {kind: parts for kind, parts in self._states(table).items() if kind in MOMENTS}

    def _states(self, table: Mapping[str, Mapped]) -> dict[str, dict[str, LazyTensor]]:
        states = {file.rank: rank_moments(file) for file in self._files}
        kinds = set.intersection(*(set(state) for state in states.values()))
        return {
            kind: RankTensors(self._files, {rank: state[kind] for rank, state in states.items()}).merged(table)
            for kind in kinds
        }


class _Sharded:
    """The `torch_dist` format."""

    def __init__(self, folder: Path):
        self._folder, self._states = ShardedFolder(folder), dict[str, dict[str, LazyTensor]]()
        self._archive = self._common_archive(folder / COMMON)
        content = self._archive.content
        # An object is in a list of its own.
        content = content[0] if isinstance(content, list) and len(content) == 1 else content
        self.common = content if isinstance(content, dict) else {}
        self._flat = False
        for name, array in self._folder.arrays.items():
            match = OPTIMIZER.match(name)
            self._flat |= match is None and name.startswith(("optimizer.", "chained_"))
            kind, rest = (match[1], match[2]) if match else ("", name)
            for tensor_name, index in unstacked(rest, array.shape):
                read: Callable[[], Any] = partial(self._folder.read, name, index)
                self._states.setdefault(kind, {})[tensor_name] = LazyTensor(
                    array.shape[len(index) :], array.dtype, read
                )
        if self._flat:
            self._states[""] = {
                name: part for name, part in self._states[""].items() if not name.startswith(("optimizer.", "chained_"))
            }

    def _common_archive(self, path: Path) -> TorchArchive:
        """The archive of the checkpoint's dict. Raises UserError if there is none."""
        if path.is_file():
            return TorchArchive(memory_map(path), str(path))
        if COMMON_OBJECT in self._folder.objects:
            return self._folder.object(COMMON_OBJECT)
        raise UserError(
            f"{path.parent} has neither {COMMON} nor {COMMON_OBJECT} in its {METADATA}: of the formats of "
            "torch.distributed, only Megatron-LM's torch_dist is read"
        )

    def view(self, place: TensorPlace) -> np.ndarray:
        return self._archive.view(place)

    def names(self) -> set[str]:
        return set(self._states.get("", {}))

    def weights(self, table: Mapping[str, Mapped]) -> dict[str, LazyTensor]:
        weights = self._states.get("", {})
        masters = {name: part for kind in MASTERS for name, part in self._states.get(kind, {}).items()}
        return {name: masters.get(name, part) for name, part in weights.items()}

    def moments(self, table: Mapping[str, Mapped]) -> dict[str, dict[str, LazyTensor]]:
        if self._flat:
            raise UnmappedError("its buffers span all weights: save it with --dist-ckpt-optim-fully-reshardable")
        moments = {kind: self._states[kind] for kind in MOMENTS if kind in self._states}
        if not moments:
            raise UnmappedError("the checkpoint has none")
        return moments
