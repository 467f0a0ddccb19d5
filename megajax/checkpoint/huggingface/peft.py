"""Adapter folders of the PEFT library: adapter_config.json and adapter_model.safetensors.

The adapter of a tensor N.weight is base_model.model.N.lora_A.weight [rank, inputs] and base_model.model.N.lora_B.weight
[outputs, rank], with inputs and outputs in the order that N.weight has by the family's table of names. Where N.weight
is several weights of ours, its adapter is one of all of them.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megajax.checkpoint.boxes import Box
from megajax.checkpoint.huggingface.peft_settings import CONFIG, AdapterSettings, read_settings
from megajax.checkpoint.huggingface.safetensors import SafetensorsFile
from megajax.checkpoint.weights.adapters import LORA_A, LORA_B, leading
from megajax.checkpoint.weights.foreign import WeightSource, declared_by
from megajax.checkpoint.weights.tensor_table import Mapped, Piece, Row, tensors_of
from megajax.config.errors import UserError
from megajax.config.nearest import nearest_names
from megajax.layers.config import LoRAConfig
from megajax.layers.param import ParamSpec

TENSORS = "adapter_model.safetensors"
BEFORE, WEIGHT, ENDS = "base_model.model.", ".weight", (".lora_A.weight", ".lora_B.weight")


class Sides(NamedTuple):
    """How a tensor of theirs orders inputs and outputs."""

    inputs: np.ndarray
    """int [inputs]: for each of theirs, its place among those of our matrix."""
    outputs: np.ndarray
    """int [outputs]: for each of theirs, its place among those of our matrices, one matrix after another."""
    conv1d: bool
    """Whether inputs are the first dimension, as in GPT-2."""


class Adapted(NamedTuple):
    """A tensor N.weight of which some weights of ours have adapters."""

    tensor: Mapped
    sides: Sides
    ends: tuple[int, ...]
    """Outputs of the weights, added up."""

    @property
    def module(self) -> str:
        """N."""
        return self.tensor.name.removesuffix(WEIGHT)

    @property
    def names(self) -> tuple[str, str]:
        """Of the two tensors of the adapter."""
        return f"{BEFORE}{self.module}{ENDS[0]}", f"{BEFORE}{self.module}{ENDS[1]}"

    def columns(self) -> Iterator[tuple[Piece, slice]]:
        """Each weight with its place among the outputs."""
        yield from zip(self.tensor.pieces, map(slice, (0, *self.ends), self.ends), strict=False)


def adapted_tensors(rows: Sequence[Row], declared: Mapping[str, ParamSpec]) -> list[Adapted]:
    """rows: the table of a family; declared: weights of a model with adapters, on one device, by path.

    Raises UserError for an adapter that is of no linear layer of theirs.
    """
    sides: dict[Any, Sides] = {}
    tensors, left = [], {path.removesuffix(LORA_A) for path in declared if path.endswith(LORA_A)}
    for tensor in tensors_of(rows, declared):
        specs = [declared[piece.path + LORA_A] for piece in tensor.pieces if piece.path + LORA_A in declared]
        if not specs or not tensor.name.endswith(WEIGHT) or len(tensor.pieces[0].index) != leading(specs[0]):
            continue
        count = len(specs[0].axes) - leading(specs[0]) - 1
        key = id(tensor.row), tuple(piece.shape for piece in tensor.pieces)
        sides[key] = sides.get(key) or _sides(tensor, count)
        sizes = [np.prod(piece.shape[count:], dtype=int) for piece in tensor.pieces]
        tensors.append(Adapted(tensor, sides[key], tuple(map(int, np.cumsum(sizes)))))
        left -= {piece.path for piece in tensor.pieces}
    if left:
        raise UserError(
            f"PEFT has no adapter for {', '.join(sorted(left))}: in the other library's files they are in no linear "
            "layer of their own. Leave them out of model.lora.targets, or merge the adapters."
        )
    return tensors


def _sides(tensor: Mapped, count: int) -> Sides:
    """Found by moving numbers of inputs and of outputs as weights are moved. count: dimensions of inputs."""
    inputs, outputs, first = [], [], 0
    for piece in tensor.pieces:
        into, out = piece.shape[:count], piece.shape[count:]
        size = int(np.prod(out))
        numbers = np.arange(np.prod(into), dtype=np.int32).reshape(*into, *[1] * len(out))
        inputs.append(np.broadcast_to(numbers, piece.shape))
        outputs.append(np.broadcast_to(np.arange(first, first + size, dtype=np.int32).reshape(out), piece.shape))
        first += size
    moved, moved_out = tensor.from_weights(inputs), tensor.from_weights(outputs)
    conv1d = bool((moved[:, :1] != moved[:1, :1]).any() or (moved_out[:1] != moved_out[:1, :1]).any())
    moved, moved_out = (moved.T, moved_out.T) if conv1d else (moved, moved_out)
    if (moved != moved[:1]).any() or (moved_out != moved_out[:, :1]).any():
        raise ValueError(f"{tensor.name} is not a linear layer: its inputs depend on its outputs")
    return Sides(moved[0].copy(), moved_out[:, 0].copy(), conv1d)


@dataclass(eq=False)
class PeftAdapter:
    """An adapter folder that fits a model: a `WeightSource` of its adapters."""

    where: str
    model: Any
    """The model config, with `lora`."""
    declared: Mapping[str, ParamSpec]
    """Weights of that model on one device, by path."""
    file: SafetensorsFile
    tensors: Sequence[Adapted]
    scales: Mapping[str, float]
    """Module -> scale of its adapter."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {path: spec.shape for path, spec in self.declared.items() if path.endswith((LORA_A, LORA_B))}

    def read(self, path: str, box: Box) -> np.ndarray:
        """In float32. Layers without an adapter have zeros, and smaller ranks than the largest are filled up."""
        return self._whole(path)[box]

    def _whole(self, path: str) -> np.ndarray:
        spec = self.declared[path]
        whole, of_inputs = np.zeros(spec.shape, np.float32), path.endswith(LORA_A)
        rank = self.model.lora.rank
        for one in self.tensors:
            for piece, columns in one.columns():
                if piece.path != path.removesuffix(LORA_A).removesuffix(LORA_B):
                    continue
                a, b = (self.file.read(name).astype(np.float32) for name in one.names)
                part = whole[piece.index]
                if of_inputs:
                    inputs = np.zeros((a.shape[1], rank), np.float32)
                    inputs[one.sides.inputs, : len(a)] = a.T
                    part[...] = inputs.reshape(part.shape)
                else:
                    factor = np.float32(self.scales[one.module] / self.model.lora.scale())
                    outputs = np.zeros((rank, len(b)), np.float32)
                    outputs[: len(a), one.sides.outputs] = b.T * factor
                    part[...] = outputs[:, columns].reshape(part.shape)
        return whole


def base_of(folder: Path) -> str | None:
    """Name or folder of the base model of an adapter, as it is written down."""
    return read_settings(folder / CONFIG).base


def read_adapter(folder: Path, base: Any, rows: Sequence[Row]) -> PeftAdapter:
    """An adapter of a model. base: its config; rows: the table of its family.

    Raises UserError with all settings and tensors that are not supported or do not fit.
    """
    settings = read_settings(folder / CONFIG)
    if not (folder / TENSORS).is_file():
        raise UserError(f"{folder} holds no {TENSORS}; other files of adapters can't be read")
    file = SafetensorsFile(folder / TENSORS)
    matrices = declared_by(replace(base, lora=LoRAConfig(rank=1, targets=("*",))))
    every = {one.names: one for one in _possible(rows, matrices)}
    present = {names: one for names, one in every.items() if file.entries.keys() & {*names}}
    tensors, tables = list(present.values()), _tables(rows, matrices)
    _demand_fit(folder, file, present, settings, tables)
    loras = {one.module: settings.lora(one.module) for one in tensors}
    scales = {module: lora.scale() for module, lora in loras.items()}
    largest = max(loras.values(), key=lambda one: one.rank)
    paths = [piece.path for one in tensors for piece in one.tensor.pieces if piece.path + LORA_A in matrices]
    lora = replace(largest, targets=tuple(dict.fromkeys(paths)))
    model = replace(base, lora=lora)
    declared = declared_by(model)
    adapter = PeftAdapter(str(folder), model, declared, file, tensors, scales)
    _demand_zeros(adapter)
    return adapter


def _possible(rows: Sequence[Row], declared: Mapping[str, ParamSpec]) -> list[Adapted]:
    """As `adapted_tensors`, of the matrices that are linear layers of theirs."""
    held = {piece.path for tensor in tensors_of(rows, declared) if tensor.name.endswith(WEIGHT)
            for piece in tensor.pieces if len(piece.index) == leading(declared[piece.path])}  # fmt: skip
    fitting = {path: spec for path, spec in declared.items() if path.removesuffix(LORA_A) in held}
    return adapted_tensors(rows, fitting)


def _tables(rows: Sequence[Row], declared: Mapping[str, ParamSpec]) -> set[str]:
    """Modules that are heads or tables of embeddings. A head that is tied to a table may have no tensor."""
    tensors = tensors_of(rows, declared)
    tables = [each for each in tensors if any("vocab" in declared[piece.path].axes for piece in each.pieces)]
    return {"lm_head", *(each.name.removesuffix(WEIGHT) for each in tables)}


def _demand_fit(
    folder: Path,
    file: SafetensorsFile,
    present: Mapping[tuple[str, str], Adapted],
    settings: AdapterSettings,
    tables: Collection[str],
) -> None:
    """Raises UserError with all tensors that are missing, unknown, or do not fit the model or the settings."""
    names, problems, ranks = {name for pair in present for name in pair}, [], {}
    for name in file.entries:
        if name not in names:
            problems.append(_unknown(name, names, tables))
        elif not np.issubdtype(dtype := file.entries[name].dtype, np.floating) and dtype.kind != "V":
            problems.append(f"{name}: its dtype is {dtype.name}, which is not a floating-point one")
    for (a, b), one in present.items():
        if a not in file.entries or b not in file.entries:
            problems.append(f"{b if a in file.entries else a}: not there")
            continue
        shapes = file.entries[a].shape, file.entries[b].shape
        rank = shapes[0][0] if shapes[0] else 0
        wanted = (rank, len(one.sides.inputs)), (len(one.sides.outputs), rank)
        if shapes != wanted:
            problems.append(f"{a}, {b}: {shapes[0]} and {shapes[1]} there, {wanted[0]} and {wanted[1]} by the model")
        ranks[one.module] = rank
    problems += settings.misfits(ranks)
    if problems or not ranks:
        lines = problems[:40] + [f"and {len(problems) - 40} more"] * (len(problems) > 40)
        what = "\n".join(f"  {line}" for line in lines) or "  there are none"
        raise UserError(f"the tensors of {folder} are no adapters of the model:\n{what}")


def _unknown(name: str, names: Collection[str], tables: Collection[str]) -> str:
    """What is wrong with a tensor that is of no linear layer of the blocks. names: of tensors that are."""
    if "lora_embedding_" in name or any(name.startswith(f"{BEFORE}{table}.") for table in tables):
        return f"{name}: adapters of heads and tables are not supported"
    near = nearest_names(name, names, at_most=1)
    return f"{name}: the model has no such layer" + (f"; it has {near[0]}" if near else "")


def _demand_zeros(adapter: PeftAdapter) -> None:
    """Raises UserError where an adapter adds to weights of ours that cannot have one."""
    for one in adapter.tensors:
        for piece, columns in one.columns():
            if piece.path + LORA_A not in adapter.declared:
                own = (one.sides.outputs >= columns.start) & (one.sides.outputs < columns.stop)
                if adapter.file.read(one.names[1])[own].any():
                    raise UserError(f"{adapter.where}: {one.names[1]} adapts {piece.path}, which has no adapter here")


def adapter_files(
    model: Any, rows: Sequence[Row], weights: WeightSource, base: str | None
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """(adapter_config.json, tensors by name) of a model with adapters.

    weights: the adapters, maybe among others; base: name or folder of the base model, to be written down.
    Raises UserError for adapters that PEFT cannot have.
    """
    lora, declared = model.lora, declared_by(model)
    written = adapted_tensors(rows, declared)
    tensors: dict[str, np.ndarray] = {}
    ranks: dict[str, int] = {}
    for one in written:
        a, b = _joined(one, weights, declared)
        tensors |= dict(zip(one.names, (a, b), strict=True))
        ranks[one.module] = len(a)
    linear = [tensor.name.removesuffix(WEIGHT) for tensor in tensors_of(rows, declared) if tensor.name.endswith(WEIGHT)]
    patterns = {one.module: _pattern(one.module, linear, ranks) for one in written}
    larger = {patterns[module]: rank for module, rank in ranks.items() if rank != lora.rank}
    alphas = {pattern: lora.scale() * (rank**0.5 if lora.rank_stabilized else rank) for pattern, rank in larger.items()}
    config = {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": _number(lora.alpha),
        "lora_dropout": lora.dropout,
        "use_rslora": lora.rank_stabilized,
        "target_modules": sorted(set(patterns.values())),
        "rank_pattern": larger,
        "alpha_pattern": {pattern: _number(alpha) for pattern, alpha in alphas.items()},
        "bias": "none",
        "fan_in_fan_out": any(one.sides.conv1d for one in written),
        "inference_mode": True,
        "modules_to_save": None,
    }
    return config, tensors


def _joined(one: Adapted, weights: WeightSource, declared: Mapping[str, ParamSpec]) -> tuple[np.ndarray, np.ndarray]:
    """The two tensors of an adapter. Those of several weights with different A stand in blocks, with added ranks."""
    parts = []
    for piece, columns in one.columns():
        if piece.path + LORA_A in declared:
            a, b = (_part(weights, piece, declared[piece.path + end]) for end in (LORA_A, LORA_B))
            parts.append((a.reshape(-1, a.shape[-1]), b.reshape(b.shape[0], -1), columns))
    first = parts[0][0]
    shared = all(np.array_equal(a, first) for a, _, _ in parts)
    inputs = first if shared else np.concatenate([a for a, _, _ in parts], axis=1)
    outputs = np.zeros((inputs.shape[1], one.ends[-1]), first.dtype)
    for number, (a, b, columns) in enumerate(parts):
        row = 0 if shared else number * a.shape[1]
        outputs[row : row + len(b), columns] = b
    return np.ascontiguousarray(inputs[one.sides.inputs].T), np.ascontiguousarray(outputs[:, one.sides.outputs].T)


def _part(weights: WeightSource, piece: Piece, spec: ParamSpec) -> np.ndarray:
    lead = [slice(int(i), int(i) + 1) for i in piece.index if not isinstance(i, slice)]
    box = (*lead, *[slice(0, size) for size in spec.shape[len(lead) :]])
    return weights.read(spec.path, box).reshape(spec.shape[len(lead) :])


def _pattern(module: str, linear: Sequence[str], adapted: Mapping[str, int]) -> str:
    """The last name of a module where it stands for adapted modules of this rank alone; else the whole name."""
    last = module.rpartition(".")[2]
    alike = [name for name in linear if name == last or name.endswith(f".{last}")]
    return last if all(adapted.get(name) == adapted[module] for name in alike) else module


def _number(value: float) -> float:
    return int(value) if value == int(value) else value
