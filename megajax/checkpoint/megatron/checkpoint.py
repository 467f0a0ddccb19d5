"""A checkpoint of Megatron-LM, in either format: what its run was, its weights, and the moments of its optimizer."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from megajax.checkpoint.megatron.archive import TorchArchive, memory_map
from megajax.checkpoint.megatron.moments import MASTER, MOMENTS, UnmappedError, rank_moments, updates
from megajax.checkpoint.megatron.names import WITHOUT_WEIGHTS, LazyTensor, NamedTensors, unstacked, without_padding
from megajax.checkpoint.megatron.pickles import Record, TensorPlace
from megajax.checkpoint.megatron.ranks import RANK, RankTensors, rank_files
from megajax.checkpoint.megatron.sharded import METADATA, ShardedFolder
from megajax.checkpoint.megatron.tables import table
from megajax.checkpoint.weights.foreign import ForeignModel, ForeignWeights, declared_by, demand_fit
from megajax.checkpoint.weights.tensor_table import Mapped, resolved
from megajax.config.errors import UserError
from megajax.layers.param import ParamSpec

TRACKER = "latest_checkpointed_iteration.txt"
COMMON = "common.pt"
OPTIMIZER = re.compile(r"^(?:chained_\d+\.)?optimizer\.state\.(\w+?)\.(.*)$")
LOST = {
    "rng_state": "states of random numbers: ours derive from seed and step",
    "rerun_state_machine": "the state of the re-run machinery",
    "opt_param_scheduler": "settings of the schedule; the samples that it has counted are kept",
    "grad_scaler": "the loss scale, which starts anew",
}
"""Parts of a checkpoint that are not taken over."""


class Contents(Protocol):
    """What either format gives."""

    @property
    def common(self) -> Mapping[str, Any]:
        """The checkpoint's dict without its weights."""
        ...

    def names(self) -> set[str]:
        """Of the weights, as tables have them."""
        ...

    def weights(self, wanted: Mapping[str, Mapped]) -> dict[str, LazyTensor]:
        """By name; of a run in 16 bits the copies in float32, where they are there."""
        ...

    def moments(self, wanted: Mapping[str, Mapped]) -> dict[str, dict[str, LazyTensor]]:
        """Kind -> name -> moment. Raises UnmappedError."""
        ...

    def view(self, place: TensorPlace) -> np.ndarray:
        """A tensor in `common`."""
        ...


class MegatronModel(NamedTuple):
    """A checkpoint that was read and fits."""

    read: ForeignModel
    table: Sequence[Mapped]
    weights: ForeignWeights
    moments: Mapping[str, ForeignWeights]
    """first_moment and second_moment, whose paths are those of the weights; none where they can't be told apart."""
    updates: int
    """Of the optimizer so far."""
    iteration: int
    consumed_samples: int
    scheduled_samples: int
    """Samples that the schedule of the learning rate has counted."""
    args: Mapping[str, Any]
    """The arguments of its run."""
    lost: tuple[str, ...]
    """What of the checkpoint is not in any of these."""

    @property
    def model(self) -> Any:
        """The model config."""
        return self.read.model


class MegatronCheckpoint:
    """One checkpoint of a folder. Nothing but descriptions has been read."""

    def __init__(self, folder: Path, step: int | None = None):
        """folder: with the tracker file, or of one iteration; step: the iteration, the newest without.

        Raises UserError for a folder without a checkpoint, and for files that are damaged or refused.
        """
        self.folder = iteration_folder(folder, step)
        self.where = str(self.folder)
        self.contents: Contents = _Sharded(self.folder) if (self.folder / METADATA).is_file() else _Ranks(self.folder)
        args = self.contents.common.get("args")
        if not isinstance(args, Record):
            raise UserError(f"{self.where} has no args: it does not say what model it is of")
        self.args: Mapping[str, Any] = args.fields

    def script(self) -> str:
        """The script of Megatron-LM that trains such models."""
        names = self.contents.names()
        if "lm_head.dense.weight" in names:
            return "pretrain_bert.py"
        both = any(name.startswith("encoder.") for name in names) and any(name.startswith("decoder.") for name in names)
        return "pretrain_t5.py" if both else "pretrain_gpt.py"

    def iteration(self) -> int:
        """Steps so far; 0 of a released model."""
        return _whole(self.contents.common.get("iteration"))

    def read(self, model: Any) -> ForeignModel:
        """As a model of ours. model: its config."""
        return self._read(model, resolved(table(model), declared_by(model)))

    def _read(self, model: Any, tensors: Sequence[Mapped]) -> ForeignModel:
        wanted = {tensor.name: tensor for tensor in tensors}
        parts = _padless(self.where, self.contents.weights(wanted), wanted)
        return ForeignModel(model=model, tensors=parts, rows=table(model), ignored=ignored(model))

    def open(self, model: Any) -> MegatronModel:
        """With its optimizer. Raises UserError with everything that does not fit the model."""
        declared = declared_by(model)
        tensors = resolved(table(model), declared)
        read = self._read(model, tensors)
        demand_fit(read.tensors, tensors, read.ignored)
        moments, lost = dict[str, ForeignWeights](), [text for key, text in LOST.items() if self._has(key)]
        try:
            moments = self._moments(tensors, declared, read.ignored)
        except UnmappedError as error:
            lost.insert(0, f"the optimizer's state: {error}")
        iteration = self.iteration()
        consumed = _whole(self.args.get("consumed_train_samples"))
        schedule = self.contents.common.get("opt_param_scheduler")
        return MegatronModel(
            read=read,
            table=tensors,
            weights=ForeignWeights(read.tensors, tensors, declared),
            moments=moments,
            updates=updates(self.contents.common.get("optimizer"), self.contents.view) or iteration,
            iteration=iteration,
            consumed_samples=consumed,
            scheduled_samples=_whole(schedule.get("num_steps") if isinstance(schedule, dict) else None) or consumed,
            args=self.args,
            lost=tuple(lost),
        )

    def _moments(
        self, tensors: Sequence[Mapped], declared: Mapping[str, ParamSpec], ignored: Sequence[str]
    ) -> dict[str, ForeignWeights]:
        """By our names. Observations have none. Raises UnmappedError."""
        trained = {path: spec for path, spec in declared.items() if spec.updater is None}
        own = {one.name: one for one in tensors if all(piece.path in trained for piece in one.pieces)}
        moments = {}
        for kind, parts in self.contents.moments(own).items():
            named = _padless(self.where, parts, own)
            demand_fit(named, list(own.values()), ignored)
            moments[MOMENTS[kind]] = ForeignWeights(named, list(own.values()), trained)
        return moments

    def _has(self, key: str) -> bool:
        inner = self.contents.common.get("optimizer")
        return key in self.contents.common or (isinstance(inner, dict) and key in inner)


def _padless(where: str, parts: Mapping[str, LazyTensor], wanted: Mapping[str, Mapped]) -> NamedTensors:
    cut = {
        name: without_padding(name, part, wanted[name].shape()) if name in wanted else part
        for name, part in parts.items()
    }
    return NamedTensors(where, cut)


def _whole(value: Any) -> int:
    return value if isinstance(value, int) else 0


def ignored(model: Any) -> tuple[str, ...]:
    """Patterns of names of tensors without weights of their own: the last stage has a copy of a tied table."""
    tied = ("output_layer.weight", "lm_head.output_layer.weight") if model.tied else ()
    return (*WITHOUT_WEIGHTS, *tied)


def iteration_folder(folder: Path, step: int | None = None) -> Path:
    """The folder of one checkpoint: the folder itself, or the one in it that the tracker file or `step` names.

    Raises UserError if there is none.
    """
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder")
    present = sorted(path.name for path in folder.iterdir() if re.fullmatch(r"iter_\d+|release", path.name))
    if step is None and not present and ((folder / METADATA).is_file() or any(_rank_folders(folder))):
        return folder
    shown = f"there are {', '.join(present)}" if present else "there are no folders iter_0000000 or release"
    if step is not None:
        name = f"iter_{step:07d}"
    else:
        try:
            text = (folder / TRACKER).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{folder} is not a checkpoint of Megatron-LM: it has no {TRACKER}, and {shown}") from error
        name = f"iter_{int(text):07d}" if text.isascii() and text.isdigit() else text
    if name not in present:
        raise UserError(f"{folder} has no checkpoint {name!r}; {shown}")
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

    def weights(self, wanted: Mapping[str, Mapped]) -> dict[str, LazyTensor]:
        weights = self._tensors.whole(wanted)
        try:
            return weights | self._states(wanted).get(MASTER, {})
        except UnmappedError:
            return weights

    def moments(self, wanted: Mapping[str, Mapped]) -> dict[str, dict[str, LazyTensor]]:
        return {kind: parts for kind, parts in self._states(wanted).items() if kind in MOMENTS}

    def _states(self, wanted: Mapping[str, Mapped]) -> dict[str, dict[str, LazyTensor]]:
        states = {file.rank: rank_moments(file) for file in self._files}
        kinds = set.intersection(*(set(state) for state in states.values()))
        return {
            kind: RankTensors(self._files, {rank: state[kind] for rank, state in states.items()}).whole(wanted)
            for kind in kinds
        }


class _Sharded:
    """The `torch_dist` format."""

    def __init__(self, folder: Path):
        path = folder / COMMON
        if not path.is_file():
            raise UserError(f"{folder} has no {COMMON}: only checkpoints of Megatron-LM's torch_dist format are read")
        archive = TorchArchive(memory_map(path), str(path))
        self.common = archive.content if isinstance(archive.content, dict) else {}
        self._archive = archive
        self._folder, self._states = ShardedFolder(folder), dict[str, dict[str, LazyTensor]]()
        self._flat = False
        for name, array in self._folder.arrays.items():
            match = OPTIMIZER.match(name)
            self._flat |= match is None and name.startswith(("optimizer.", "chained_"))
            kind, rest = (match[1], match[2]) if match else ("", name)
            for each, index in unstacked(rest, array.shape):
                read: Callable[[], Any] = partial(self._folder.read, name, index)
                self._states.setdefault(kind, {})[each] = LazyTensor(array.shape[len(index) :], array.dtype, read)
        if self._flat:
            self._states[""] = {
                name: part for name, part in self._states[""].items() if not name.startswith(("optimizer.", "chained_"))
            }

    def view(self, place: TensorPlace) -> np.ndarray:
        return self._archive.view(place)

    def names(self) -> set[str]:
        return set(self._states.get("", {}))

    def weights(self, wanted: Mapping[str, Mapped]) -> dict[str, LazyTensor]:
        weights = self._states.get("", {})
        masters = self._states.get(MASTER, {})
        return {name: masters.get(name, part) for name, part in weights.items()}

    def moments(self, wanted: Mapping[str, Mapped]) -> dict[str, dict[str, LazyTensor]]:
        if self._flat:
            raise UnmappedError("it is in buffers over all weights: save it with --dist-ckpt-optim-fully-reshardable")
        moments = {kind: self._states[kind] for kind in MOMENTS if kind in self._states}
        if not moments:
            raise UnmappedError("the checkpoint has none")
        return moments
