"""Folders with a file for each rank: Megatron-LM's `torch` format, mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt.

TT is the rank of tensor parallelism, PPP of the pipeline, EEE of experts; the latter two appear only if there is more
than one rank. With virtual stages, a file has model0, model1, …. Layers and experts are numbered from 0 in each file.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megajax.config.errors import UserError
from megajax.interop.megatron.checkpoints.archive import TorchArchive, memory_map
from megajax.interop.megatron.checkpoints.names import (
    GROUPED,
    LAYERS,
    PACKED,
    TOKENS,
    LazyTensor,
    experts_of,
    flattened,
    plain,
)
from megajax.interop.megatron.checkpoints.pickles import Record, TensorPlace
from megajax.interop.weights.name_mapping import MappedTensor

FILE = "model_optim_rng.pt"
RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?$")
INTERLEAVED = re.compile(r"\.(linear_fc1|mixer\.in_proj|mixer\.conv1d_\w+)(\.|$)")
"""Fused tensors with a share of every piece on each rank: [gate; up] of a rank, not the gates of all ranks first."""
LOCAL_EXPERT = re.compile(r"\.local_experts\.(\d+)\.")
OLDEST_VERSION = 2.0
"""Oldest supported checkpoint version. Before it, the rows of queries, keys and values had another order."""


class Rank(NamedTuple):
    """The part of a model in a file."""

    tensor: int
    pipeline: int
    expert: int


@dataclass(frozen=True, slots=True)
class RankFile:
    """The file of a rank."""

    rank: Rank
    archive: TorchArchive

    def chunks(self) -> list[dict[str, Any]]:
        """The model, or a chunk for each virtual stage."""
        content = self.archive.content
        names = ["model"] if "model" in content else sorted(
            (name for name in content if re.fullmatch(r"model\d+", str(name))), key=lambda name: int(name[5:])
        )  # fmt: skip
        return [dict(flattened(content[name])) for name in names]


def rank_files(folder: Path) -> list[RankFile]:
    """The files of a folder. Raises UserError for one that is missing or damaged."""
    paths = sorted(path for path in folder.iterdir() if RANK.match(path.name))
    if absent := [str(path / FILE) for path in paths if not (path / FILE).is_file()]:
        raise UserError(f"{folder} is incomplete: {', '.join(absent)} is missing")
    archives = [TorchArchive(memory_map(path / FILE), str(path / FILE)) for path in paths]
    for archive in archives:
        if not isinstance(archive.content, dict):
            raise UserError(f"{archive.where} holds a {type(archive.content).__name__}, not a checkpoint's dict")
        version = archive.content.get("checkpoint_version", 0)
        if not isinstance(version, float | int) or version < OLDEST_VERSION:
            raise UserError(
                f"{archive.where} has checkpoint_version {version}; versions from {OLDEST_VERSION} are read"
            )
    stages = namespace(archives[0]).get("pipeline_model_parallel_size", 1) if archives else 1
    files = [RankFile(_rank(path.name, stages), archive) for path, archive in zip(paths, archives, strict=True)]
    _demand_all(folder, files)
    return files


def namespace(archive: TorchArchive) -> dict[str, Any]:
    """The arguments of the run that saved the file; {} if it has none."""
    args = archive.content.get("args")
    return args.fields if isinstance(args, Record) else {}


def _rank(name: str, stages: Any) -> Rank:
    tensor, *model_ranks = map(int, name.split("_")[2:])
    if len(model_ranks) == 2:
        return Rank(tensor, *model_ranks)
    last = model_ranks[0] if model_ranks else 0
    return Rank(tensor, last, 0) if stages != 1 else Rank(tensor, 0, last)


def _demand_all(folder: Path, files: list[RankFile]) -> None:
    """Raises UserError unless every tensor rank of every stage, and every rank of experts, has a file."""
    if not files:
        raise UserError(f"{folder} holds no mp_rank_XX/{FILE}")
    args, ranks = namespace(files[0].archive), [file.rank for file in files]
    names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")
    sizes = [
        max(1 + max(rank[place] for rank in ranks), size if isinstance(size := args.get(name), int) else 1)
        for place, name in enumerate(names)
    ]
    pairs, experts = {rank[:2] for rank in ranks}, {rank.expert for rank in ranks}
    missing = [f"tensor rank {t} of stage {p}" for p in range(sizes[1]) for t in range(sizes[0]) if (t, p) not in pairs]
    missing += [f"expert rank {number}" for number in range(sizes[2]) if number not in experts]
    if missing:
        raise UserError(f"{folder} is incomplete: there is no file of {', '.join(missing)}")


class RankTensors:
    """The tensors of all ranks, by their names in the whole model."""

    def __init__(self, files: Sequence[RankFile], chunks: Mapping[Rank, list[dict[str, Any]]]):
        """chunks: rank -> for each virtual stage, name within the file -> place."""
        self.where = str(Path(files[0].archive.where).parents[1])
        self._files, self._chunks = files, chunks
        self._offsets = self._layer_offsets()
        self.pieces: dict[str, dict[Rank, LazyTensor]] = defaultdict(dict)
        for file in files:
            for number, chunk in enumerate(chunks[file.rank]):
                for name, place in chunk.items():
                    if isinstance(place, TensorPlace) and not name.endswith("_extra_state"):
                        numbered = self._numbered(name, number, file.rank.pipeline)
                        for tensor_name, part in self._experts(file, numbered, place):
                            self.pieces[tensor_name][file.rank] = part

    def _numbered(self, name: str, chunk: int, stage: int) -> str:
        match = LAYERS.match(name)
        if match is None or match[2] is None:
            return name
        return f"{match[1]}.{int(match[2]) + self._offsets[match[1], chunk, stage]}.{match[3]}"

    def _layer_offsets(self) -> dict[tuple[str, int, int], int]:
        """(stack, chunk, stage) -> number of layers before it: those of chunk 0 on all stages, then of chunk 1, …."""
        counts: dict[tuple[str, int, int], int] = defaultdict(int)
        for rank, chunks in self._chunks.items():
            for number, chunk in enumerate(chunks):
                for match in filter(None, map(LAYERS.match, chunk)):
                    place = (match[1], number, rank.pipeline)
                    counts[place] = max(counts[place], int(match[2] or 0) + 1)
        offsets = {}
        for stack in {stack for stack, _, _ in counts}:
            before = 0
            for place in sorted(place for place in counts if place[0] == stack):
                offsets[place] = before
                before += counts[place]
        return offsets

    def _experts(self, file: RankFile, name: str, place: TensorPlace) -> Iterator[tuple[str, LazyTensor]]:
        """The tensors in a tensor of a file, with experts numbered over the model."""
        part = LazyTensor(place.shape, place.dtype, partial(file.archive.view, place))
        count = self._local_experts(file)
        try:
            for tensor_name, expert_part in experts_of(name, part, count):
                number = LOCAL_EXPERT.search(tensor_name)
                if number is not None:
                    tensor_name = LOCAL_EXPERT.sub(
                        f".local_experts.{int(number[1]) + file.rank.expert * count}.", tensor_name
                    )
                yield plain(tensor_name), expert_part
        except ValueError as error:
            raise UserError(f"{file.archive.where}: {name}: {error}") from error

    def _local_experts(self, file: RankFile) -> int:
        """Number of experts of a layer in a file."""
        experts = namespace(file.archive).get("num_experts")
        if isinstance(experts, int):
            return experts // (1 + max(rank_file.rank.expert for rank_file in self._files))
        names = [name for chunk in self._chunks[file.rank] for name in chunk]
        if any(map(PACKED.match, names)):
            raise UserError(f"{file.archive.where}: its args have no num_experts")
        numbers = [int(match[1]) for match in map(LOCAL_EXPERT.search, names) if match]
        return 1 + max([*numbers, *(int(match[2]) for match in map(GROUPED.match, names) if match)], default=0)

    def merged(self, table: Mapping[str, MappedTensor]) -> dict[str, LazyTensor]:
        """Tensors merged from the ranks' shares. table: name -> tensor of the model; others are not merged."""
        return {name: self._merged(name, shares, table.get(name)) for name, shares in self.pieces.items()}

    def _merged(self, name: str, shares: Mapping[Rank, LazyTensor], tensor: MappedTensor | None) -> LazyTensor:
        """Concatenates shares along the dimension in which they are smaller than the tensor, if there is one."""
        by_rank: dict[int, LazyTensor] = {}
        for rank in sorted(shares):
            by_rank.setdefault(rank.tensor, shares[rank])
        first = next(iter(by_rank.values()))
        if tensor is None:
            return first
        padded = TOKENS.search(name) is not None
        shape = (len(by_rank) * first.shape[0], *first.shape[1:]) if padded else tensor.shape()
        smaller = [place for place, sizes in enumerate(zip(first.shape, shape, strict=False)) if sizes[0] != sizes[1]]
        if len(first.shape) != len(shape) or len(smaller) != 1 or shape[smaller[0]] % max(first.shape[smaller[0]], 1):
            return first
        axis = smaller[0]
        count = shape[axis] // first.shape[axis]
        by_share = {rank % count: by_rank[rank] for rank in sorted(by_rank, reverse=True)}
        parts = [by_share[number] for number in sorted(by_share)]
        if len(parts) < count or (count < len(by_rank) and ".experts." not in name):
            return first
        if any(part.shape != first.shape for part in parts):
            raise UserError(
                f"{self.where}: the shapes of {name} differ between ranks: {[part.shape for part in parts]}"
            )
        sections = [1]
        if INTERLEAVED.search(name):
            sections = [piece.size for piece in tensor.to_weights(np.broadcast_to(np.int8(0), tensor.shape()))]
        return LazyTensor(shape, first.dtype, partial(_joined, parts, axis, sections))


def _joined(parts: list[LazyTensor], axis: int, sections: list[int]) -> np.ndarray:
    """Concatenates shares of ranks, section by section. sections: relative sizes of the sections of a share."""
    stops = np.cumsum(sections)[:-1]
    arrays = [part.read() for part in parts]
    shares = [np.split(array, stops * array.shape[axis] // sum(sections), axis) for array in arrays]
    return np.concatenate([share[number] for number in range(len(sections)) for share in shares], axis)


MOMENTS: Mapping[str, str] = {"exp_avg": "first_moment", "exp_avg_sq": "second_moment"}
"""Name in Megatron-LM -> name in MegaJAX."""
MASTER = "fp32_param"
"""Name of the float32 copies of weights in a run in 16 bits."""
BUFFERS = ("expert_bias", "inv_freq", "local_tokens_per_expert", "global_tokens_per_expert", "ga_steps", "_extra_state")
"""Last parts of names of tensors that no optimizer updates."""
EXPERT = ".mlp.experts."


class UnmappedError(Exception):
    """The state of an optimizer can't be assigned to weights; the message is the reason."""


def rank_moments(file: RankFile) -> dict[str, list[dict[str, TensorPlace]]]:
    """Kind of moment -> chunk -> name within the file -> place, from the optimizer state of a file.

    Weights are numbered group by group, and within a group in the order of the model. One group has weight decay
    (wd_mult 1), the other has biases and vectors without it (wd_mult 0); with expert parallelism, experts have two
    groups of their own. Raises UnmappedError for another kind of state, and for mismatches of counts or shapes.
    """
    chunks = [
        {name: place for name, place in chunk.items() if isinstance(place, TensorPlace) and not name.endswith(BUFFERS)}
        for chunk in file.chunks()
    ]
    rest = [(number, name, place) for number, chunk in enumerate(chunks) for name, place in chunk.items()]
    result: dict[str, list[dict[str, TensorPlace]]] = {}
    optimizers = list(_optimizers(file.archive.content.get("optimizer")))
    has_expert_groups = any(
        group.get("is_expert_parallel") for optimizer in optimizers for group in optimizer["param_groups"]
    )
    for optimizer in optimizers:
        states, masters = optimizer["state"], optimizer.get("masters")
        for place, group in enumerate(optimizer["param_groups"]):
            members = [weight for weight in rest if _belongs(weight, group, has_expert_groups)]
            rest = [weight for weight in rest if not _belongs(weight, group, has_expert_groups)]
            if len(members) != len(group["params"]):
                raise UnmappedError(f"a group has {len(group['params'])} weights where {len(members)} were expected")
            if masters is not None and len(masters[place]) != len(members):
                raise UnmappedError("only some of its weights have a copy in float32")
            for index, ((number, name, weight), key) in enumerate(zip(members, group["params"], strict=True)):
                values = {kind: states.get(key, {}).get(kind) for kind in MOMENTS}
                if masters is not None:
                    values[MASTER] = masters[place][index]
                for kind, value in values.items():
                    if not isinstance(value, TensorPlace) or value.shape != weight.shape:
                        shape = getattr(value, "shape", None)
                        raise UnmappedError(f"{kind} of {name} has the shape {shape}, the weight {weight.shape}")
                    result.setdefault(kind, [{} for _ in chunks])[number][name] = value
    if rest:
        raise UnmappedError(f"it has no state of {rest[0][1]}")
    return result


def _optimizers(content: object) -> Iterator[dict[str, Any]]:
    """The optimizers of a state: several where experts have their own."""
    if content is None:
        raise UnmappedError("the checkpoint has none")
    for optimizer in content if isinstance(content, list) else [content]:
        if not isinstance(optimizer, dict):
            raise UnmappedError("it is of an unknown kind")
        inner = optimizer.get("optimizer", optimizer)
        if not isinstance(inner, dict) or not inner.get("state") or "param_groups" not in inner:
            raise UnmappedError("it is of a distributed optimizer, whose buffers span all weights")
        fields = {"state": inner["state"], "param_groups": inner["param_groups"]}
        masters = optimizer.get("fp32_from_fp16_params")
        yield fields | ({"masters": masters} if masters else {})


def _belongs(weight: tuple[int, str, TensorPlace], group: Mapping[str, Any], has_expert_groups: bool) -> bool:
    """Whether Megatron-LM puts a weight into a group. has_expert_groups: whether experts have groups of their own."""
    _, name, place = weight
    decays = not (name.endswith(".bias") or len(place.shape) == 1)
    if group.get("is_decoupled_lr"):
        raise UnmappedError("the embedding has its own learning rate")
    right_group = not has_expert_groups or bool(group.get("is_expert_parallel")) == (EXPERT in name)
    return right_group and decays == bool(group.get("wd_mult", 1.0))


def updates(content: object, view: Callable[[TensorPlace], np.ndarray]) -> int | None:
    """Number of updates in the state of an optimizer, of its groups or its weights; None if it has none.

    view: reads a tensor of the state.
    """
    for optimizer in content if isinstance(content, list) else [content]:
        inner = optimizer.get("optimizer", optimizer) if isinstance(optimizer, dict) else {}
        states, groups = (inner.get("state"), inner.get("param_groups")) if isinstance(inner, dict) else (None, None)
        steps = [group.get("step") for group in groups or () if isinstance(group, dict)]
        if isinstance(states, dict):
            steps += [
                states.get("common_step"),
                *(state.get("step") for state in states.values() if isinstance(state, dict)),
            ]
        steps = [view(step) if isinstance(step, TensorPlace) else step for step in steps]
        counts = [int(step) for step in steps if isinstance(step, int | float) or getattr(step, "size", 0) == 1]
        if counts:
            return max(counts)
    return None
