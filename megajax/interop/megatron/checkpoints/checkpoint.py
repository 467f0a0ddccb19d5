"""A checkpoint of Megatron-LM in either format: the arguments of its run, weights, and optimizer moments.

The `torch_dist` format keeps its arrays in a folder of `torch.distributed.checkpoint`: `.metadata` is a pickle with the
shape, dtype and chunks of every array, and the .distcp file and position of each chunk and of each object that is no
array. A chunk or an object is an archive of `torch.save`.
"""

import mmap
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megajax.config.errors import UserError
from megajax.interop.megatron.checkpoints.archive import TorchArchive, memory_map
from megajax.interop.megatron.checkpoints.names import (
    WITHOUT_WEIGHTS,
    LazyTensor,
    NamedTensors,
    unstacked,
    without_padding,
)
from megajax.interop.megatron.checkpoints.pickles import DTYPES, Name, Record, TensorPlace, read_pickle
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
from megajax.interop.megatron.checkpoints.tables import second_names, table
from megajax.interop.weights.foreign import ForeignModel, ForeignWeights, declared_by, demand_fit
from megajax.interop.weights.name_mapping import MappedTensor, resolved
from megajax.layers.param import ParamSpec
from megajax.storage.safe_paths import is_plain

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


class MegatronModel(NamedTuple):
    """A checkpoint whose tensors match its model."""

    foreign: ForeignModel
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


class MegatronCheckpoint:
    """One checkpoint of a folder. The constructor reads only metadata."""

    def __init__(self, folder: Path):
        """folder: with the tracker file, or of one iteration.

        Raises UserError for a folder without a checkpoint, and for files that are damaged or refused.
        """
        self.folder = iteration_folder(folder)
        self.where = str(self.folder)
        is_sharded = (self.folder / METADATA).is_file()
        self.contents = _Sharded(self.folder) if is_sharded else _Ranks(self.folder)
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

    def open(self, model: Any) -> MegatronModel:
        """The model with its optimizer. Raises UserError with everything that does not match the model."""
        declared = declared_by(model)
        tensors = resolved(table(model), declared)
        by_name = {tensor.name: tensor for tensor in tensors}
        parts = _padless(self.where, self.contents.weights(by_name), by_name)
        foreign = ForeignModel(model=model, tensors=parts, rows=table(model), ignored=ignored(model))
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
            moments=moments,
            updates=updates(self.contents.common.get("optimizer"), self.contents.view) or iteration,
            iteration=iteration,
            consumed_samples=consumed,
            scheduled_samples=_int(schedule.get("num_steps") if isinstance(schedule, dict) else None) or consumed,
            args=self.args,
            dropped=tuple(dropped),
        )

    def _moments(
        self, tensors: Sequence[MappedTensor], declared: Mapping[str, ParamSpec], ignored: Sequence[str]
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


def _padless(where: str, parts: Mapping[str, LazyTensor], table: Mapping[str, MappedTensor]) -> NamedTensors:
    tensors = {
        name: without_padding(name, part, table[name].shape()) if name in table else part
        for name, part in parts.items()
    }
    return NamedTensors(where, tensors)


def _int(value: object) -> int:
    return value if isinstance(value, int) else 0


def ignored(model: Any) -> tuple[str, ...]:
    """Patterns of names of tensors that hold no weights, or copies: the last stage has a copy of a tied table."""
    tied = ("output_layer.weight", "lm_head.output_layer.weight") if model.tied else ()
    return (*WITHOUT_WEIGHTS, *tied, *second_names(model).values())


def iteration_folder(folder: Path) -> Path:
    """The folder of one checkpoint: the folder itself, or the one in it that the tracker file names.

    Raises UserError if there is none.
    """
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder")
    present = sorted(path.name for path in folder.iterdir() if re.fullmatch(r"iter_\d+|release", path.name))
    if not present and ((folder / METADATA).is_file() or any(_rank_folders(folder))):
        return folder
    listing = f"there are {', '.join(present)}" if present else "there are no folders iter_0000000 or release"
    try:
        text = (folder / TRACKER).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{folder} is not a checkpoint of Megatron-LM: it has no {TRACKER}, and {listing}") from error
    name = f"iter_{int(text):07d}" if text.isascii() and text.isdigit() else text
    if name not in present:
        raise UserError(f"{folder} has no checkpoint {name!r}; {listing}")
    return folder / name


def _rank_folders(folder: Path) -> Iterator[Path]:
    return (path for path in folder.iterdir() if RANK.match(path.name))


class _Ranks:
    """The `torch` format. common: the checkpoint's dict without its weights. table: name -> tensor of the model."""

    def __init__(self, folder: Path):
        self._files = rank_files(folder)
        first = self._files[0].archive.content
        self.common = {key: value for key, value in first.items() if not str(key).startswith("model")}
        self._tensors = RankTensors(self._files, {file.rank: file.chunks() for file in self._files})

    def view(self, place: TensorPlace) -> np.ndarray:
        """A tensor in `common`."""
        return self._files[0].archive.view(place)

    def names(self) -> set[str]:
        """Names of the weights, as in tables."""
        return set(self._tensors.pieces)

    def weights(self, table: Mapping[str, MappedTensor]) -> dict[str, LazyTensor]:
        """The weights by name; of a run in 16 bits, the float32 copies if the checkpoint has them."""
        weights = self._tensors.merged(table)
        try:
            return weights | self._states(table).get(MASTER, {})
        except UnmappedError:
            return weights

    def moments(self, table: Mapping[str, MappedTensor]) -> dict[str, dict[str, LazyTensor]]:
        """Kind -> name -> moment. Raises UnmappedError."""
        return {kind: parts for kind, parts in self._states(table).items() if kind in MOMENTS}

    def _states(self, table: Mapping[str, MappedTensor]) -> dict[str, dict[str, LazyTensor]]:
        states = {file.rank: rank_moments(file) for file in self._files}
        kinds = set.intersection(*(set(state) for state in states.values()))
        return {
            kind: RankTensors(self._files, {rank: state[kind] for rank, state in states.items()}).merged(table)
            for kind in kinds
        }


class _Sharded:
    """The `torch_dist` format, with the methods of `_Ranks`."""

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

    def weights(self, table: Mapping[str, MappedTensor]) -> dict[str, LazyTensor]:
        weights = self._states.get("", {})
        masters = {name: part for kind in MASTERS for name, part in self._states.get(kind, {}).items()}
        return {name: masters.get(name, part) for name, part in weights.items()}

    def moments(self, table: Mapping[str, MappedTensor]) -> dict[str, dict[str, LazyTensor]]:
        if self._flat:
            raise UnmappedError("its buffers span all weights: save it with --dist-ckpt-optim-fully-reshardable")
        moments = {kind: self._states[kind] for kind in MOMENTS if kind in self._states}
        if not moments:
            raise UnmappedError("the checkpoint has none")
        return moments


METADATA = ".metadata"


@dataclass(frozen=True, slots=True)
class ArchiveBytes:
    """The bytes of an archive."""

    file: str
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class ArrayBox:
    """A box of an array."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    place: ArchiveBytes


@dataclass(frozen=True, slots=True)
class ShardedArray:
    """An array of the folder."""

    shape: tuple[int, ...]
    dtype: np.dtype
    chunks: tuple[ArrayBox, ...]


class ShardedFolder:
    """The arrays and objects of a folder.

    Attributes:
        arrays: by name.
        objects: names of the others.

    Raises:
        UserError: the folder is damaged.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.where, self._files = str(folder / METADATA), dict[str, mmap.mmap]()
        content = read_pickle(memoryview(memory_map(folder / METADATA)), self.where)
        try:
            metadata, storage = content.fields["state_dict_metadata"], content.fields["storage_data"]
            self._places = {(key.fields["fqn"], key.fields.get("offset")): info for key, info in storage.items()}
            self.arrays: Mapping[str, ShardedArray] = {
                name: self._array(name, record)
                for name, record in metadata.items()
                if record.kind.endswith(".TensorStorageMetadata")
            }
            self.objects = frozenset(metadata) - set(self.arrays)
        except (AttributeError, KeyError, TypeError, IndexError) as error:
            raise UserError(f"{self.where} does not describe a checkpoint of torch.distributed ({error!r})") from error

    def read(self, name: str, index: tuple[int, ...] = ()) -> np.ndarray:
        """array[index]: a view of the file if it is in one chunk. Reads only the chunks that overlap the index."""
        array = self.arrays[name]
        shape, touched = array.shape[len(index) :], []
        for chunk in array.chunks:
            ahead = list(zip(index, chunk.offsets, chunk.sizes, strict=False))
            if all(start <= number < start + size for number, start, size in ahead):
                inside = tuple(number - start for number, start, _ in ahead)
                touched.append((chunk, self._values(name, array, chunk)[inside]))
        if sum(part.size for _, part in touched) != prod(shape):
            raise UserError(
                f"{self.where} is damaged: the chunks of {name} do not make up its shape {list(array.shape)}"
            )
        if len(touched) == 1:
            return touched[0][1]
        result = np.empty(shape, array.dtype)
        for chunk, part in touched:
            starts = chunk.offsets[len(index) :]
            result[tuple(slice(start, start + size) for start, size in zip(starts, part.shape, strict=True))] = part
        return result

    def object(self, name: str) -> TorchArchive:
        """The archive of an object. Raises UserError if it is damaged or refused."""
        try:
            return self._archive(name, self._place(name, None))
        except (AttributeError, KeyError, TypeError) as error:
            raise UserError(f"{self.where} does not describe a checkpoint of torch.distributed ({error!r})") from error

    def _archive(self, name: str, place: ArchiveBytes) -> TorchArchive:
        if place.file not in self._files:
            self._files[place.file] = memory_map(self.folder / place.file)
        where = f"{self.folder / place.file} ({name})"
        return TorchArchive(self._files[place.file], where, place.start, place.length)

    def _values(self, name: str, array: ShardedArray, chunk: ArrayBox) -> np.ndarray:
        archive = self._archive(name, chunk.place)
        if not isinstance(archive.content, TensorPlace):
            raise UserError(f"{archive.where}: a tensor was expected, not a {type(archive.content).__name__}")
        values = archive.view(archive.content)
        if values.shape != chunk.sizes or values.dtype != array.dtype:
            actual, expected = f"{values.dtype.name}{list(values.shape)}", f"{array.dtype.name}{list(chunk.sizes)}"
            raise UserError(f"{archive.where} is {actual}, but {METADATA} says {expected}")
        return values

    def _array(self, name: str, metadata: Record) -> ShardedArray:
        shape, properties = metadata.fields["size"], metadata.fields["properties"]
        dtype = properties.fields["dtype"] if "dtype" in properties.fields else properties.fields["state"][0]
        if not isinstance(dtype, Name) or dtype.dotted not in DTYPES:
            raise UserError(f"{self.where}: {name} has the unknown dtype {dtype}")
        chunks = []
        for chunk in metadata.fields["chunks"]:
            offsets, sizes = chunk.fields["offsets"], chunk.fields["sizes"]
            place = self._place(name, offsets)
            if not all(start + size <= end for start, size, end in zip(offsets, sizes, shape, strict=True)):
                raise UserError(f"{self.where} is damaged: the chunk of {name} at {offsets} is outside of {shape}")
            chunks.append(ArrayBox(offsets, sizes, place))
        return ShardedArray(shape, DTYPES[dtype.dotted], tuple(chunks))

    def _place(self, name: str, offsets: tuple[int, ...] | None) -> ArchiveBytes:
        """The bytes of a chunk, or of an object. Raises UserError for files that are outside of the folder, missing or
        compressed, and for positions that are none.
        """
        if (name, offsets) not in self._places:
            chunk = name if offsets is None else f"the chunk of {name} at {offsets}"
            raise UserError(f"{self.where} is damaged: it has no position of {chunk}")
        info = self._places[name, offsets].fields
        file, start, length = info["relative_path"], info["offset"], info["length"]
        if not is_plain(file):
            raise UserError(f"{self.where} was refused: it says that {name} is in {file!r}, outside of its folder")
        if file not in self._present:
            raise UserError(f"{self.where} says that {name} is in {file}, which is missing")
        if info.get("transform_descriptors"):
            raise UserError(f"{self.folder / file} is compressed ({info['transform_descriptors']}): save it without")
        if not all(type(number) is int and number >= 0 for number in (start, length)):
            raise UserError(f"{self.where} is damaged: {name} begins at {start!r} and has {length!r} bytes")
        return ArchiveBytes(file, start, length)

    @cached_property
    def _present(self) -> set[str]:
        return {path.name for path in self.folder.iterdir()}
