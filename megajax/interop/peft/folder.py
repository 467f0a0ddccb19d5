"""Adapter folders of the PEFT library: adapter_config.json and adapter_model.safetensors.

The adapter of a tensor N.weight is base_model.model.N.lora_A.weight [rank, inputs] and base_model.model.N.lora_B.weight
[outputs, rank], with inputs and outputs in the order of N.weight in the family's table of names; with DoRA, also
base_model.model.N.lora_magnitude_vector [outputs]. If N.weight holds several weights of the model, one adapter adapts
all of them.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megajax.checkpoint.boxes import Box
from megajax.checkpoint.weight_source import WeightSource
from megajax.config.errors import UserError
from megajax.config.hints import below, nearest_names
from megajax.interop.huggingface.family import Family
from megajax.interop.peft.settings import CONFIG, AdapterSettings, read_settings
from megajax.interop.weights.adapters import leading
from megajax.interop.weights.foreign import declared_by
from megajax.interop.weights.name_mapping import MappedTensor, Row, WeightPiece, tensors_of
from megajax.interop.weights.quantize_on_load import Quantizing
from megajax.interop.weights.safetensors import SafetensorsFile
from megajax.layers.lora.config import LoRAConfig
from megajax.layers.low_rank import ADAPTERS, LORA_A, LORA_B, MAGNITUDE
from megajax.layers.param import ParamSpec

TENSORS = "adapter_model.safetensors"
PREFIX, WEIGHT, SUFFIXES = "base_model.model.", ".weight", (".lora_A.weight", ".lora_B.weight")
VECTOR = ".lora_magnitude_vector"


class Order(NamedTuple):
    """The order of inputs and outputs in a tensor of the PEFT library."""

    inputs: np.ndarray
    """int [inputs]: for each input of the tensor, its index in the matrix of the model."""
    outputs: np.ndarray
    """int [outputs]: for each output of the tensor, its index in the matrices of the model, one after another."""
    conv1d: bool
    """Whether inputs are the first dimension, as in GPT-2."""


class Adapted(NamedTuple):
    """A tensor N.weight that holds weights with adapters."""

    tensor: MappedTensor
    order: Order
    stops: tuple[int, ...]
    """Cumulative number of outputs of the weights."""

    @property
    def module(self) -> str:
        """N."""
        return self.tensor.name.removesuffix(WEIGHT)

    @property
    def names(self) -> tuple[str, str]:
        """Names of the two tensors of the adapter."""
        return f"{PREFIX}{self.module}{SUFFIXES[0]}", f"{PREFIX}{self.module}{SUFFIXES[1]}"

    @property
    def vector(self) -> str:
        """Name of the tensor of magnitudes."""
        return f"{PREFIX}{self.module}{VECTOR}"

    def columns(self) -> Iterator[tuple[WeightPiece, slice]]:
        """Each weight with its range of outputs."""
        yield from zip(self.tensor.pieces, map(slice, (0, *self.stops), self.stops), strict=False)


def adapted_tensors(rows: Sequence[Row], declared: Mapping[str, ParamSpec]) -> list[Adapted]:
    """The tensors of adapters of weights that are linear layers in the other library.

    rows: the table of a family; declared: weights with adapters on one device, by path.
    """
    orders: dict[Any, Order | None] = {}
    tensors = []
    for tensor in tensors_of(rows, declared):
        specs = [declared[piece.path + LORA_A] for piece in tensor.pieces if piece.path + LORA_A in declared]
        if not specs or not tensor.name.endswith(WEIGHT) or len(tensor.pieces[0].index) != leading(specs[0]):
            continue
        count = len(specs[0].axes) - leading(specs[0]) - 1
        key = id(tensor.row), tuple(piece.shape for piece in tensor.pieces)
        if key not in orders:
            orders[key] = _order(tensor, count)
        if (order := orders[key]) is None:
            continue
        sizes = [np.prod(piece.shape[count:], dtype=int) for piece in tensor.pieces]
        tensors.append(Adapted(tensor, order, tuple(map(int, np.cumsum(sizes)))))
    return tensors


def _demand_adapters(layers: Sequence[Adapted], declared: Mapping[str, ParamSpec]) -> None:
    """Raises UserError for an adapter of a weight that is not a linear layer in the other library."""
    unmatched = {path.removesuffix(LORA_A) for path in declared if path.endswith(LORA_A)}
    if unmatched := unmatched - {piece.path for layer in layers for piece in layer.tensor.pieces}:
        raise UserError(
            f"PEFT has no adapter for {', '.join(sorted(unmatched))}: in the other library they are not linear layers, "
            "or one with the inputs of another. Leave them out of model.lora.targets, or merge the adapters."
        )


def _order(tensor: MappedTensor, count: int) -> Order | None:
    """Found by converting the indices of inputs and outputs like weights. count: number of input dimensions.

    None for a tensor whose weights have inputs of their own, as in a prediction block.
    """
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
        return None
    return Order(moved[0].copy(), moved_out[:, 0].copy(), conv1d)


@dataclass(eq=False)
class PeftAdapter:
    """An adapter folder that matches a model: a `WeightSource` of its adapters."""

    where: str
    model: Any
    """The model config, with `lora`."""
    declared: Mapping[str, ParamSpec]
    """Weights of that model on one device, by path."""
    file: SafetensorsFile
    layers: Sequence[Adapted]
    scales: Mapping[str, float]
    """Module -> scale of its adapter."""
    base: WeightSource | None = None
    """Weights of the adapted model: magnitudes are read less the norms of its matrices. None: none are read."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {path: spec.shape for path, spec in self.declared.items() if path.endswith(ADAPTERS)}

    def read(self, path: str, box: Box) -> np.ndarray:
        """A box of an adapter in float32. Layers without an adapter, and ranks beyond that of a layer, are zero."""
        return (self._read_magnitudes if path.endswith(MAGNITUDE) else self._read_weight)(path)[box]

    def _read_magnitudes(self, path: str) -> np.ndarray:
        if self.base is None:
            raise ValueError(f"{path} is relative to the weights of the model, which were not given")
        matrix, changes = path.removesuffix(MAGNITUDE), np.zeros(self.declared[path].shape, np.float32)
        for layer in self.layers:
            for piece, columns in layer.columns():
                if piece.path == matrix:
                    values = np.zeros(layer.stops[-1], np.float32)
                    values[layer.order.outputs] = self.file.read(layer.vector).astype(np.float32)
                    norms = norms_of(_part(self.base, piece, matrix), self.declared[matrix + LORA_A])
                    changes[piece.index] = values[columns].reshape(norms.shape) - norms
        return changes

    def _read_weight(self, path: str) -> np.ndarray:
        spec = self.declared[path]
        weight, of_inputs = np.zeros(spec.shape, np.float32), path.endswith(LORA_A)
        rank = self.model.lora.rank
        for layer in self.layers:
            for piece, columns in layer.columns():
                if piece.path != path.removesuffix(LORA_A).removesuffix(LORA_B):
                    continue
                a, b = (self.file.read(name).astype(np.float32) for name in layer.names)
                part = weight[piece.index]
                if of_inputs:
                    inputs = np.zeros((a.shape[1], rank), np.float32)
                    inputs[layer.order.inputs, : len(a)] = a.T
                    part[...] = inputs.reshape(part.shape)
                else:
                    factor = np.float32(self.scales[layer.module] / self.model.lora.scale())
                    outputs = np.zeros((rank, len(b)), np.float32)
                    outputs[: len(a), layer.order.outputs] = b.T * factor
                    part[...] = outputs[:, columns].reshape(part.shape)
        return weight


def base_of(folder: Path, advice: str) -> Path:
    """The folder that an adapter names as its base model. Raises UserError, with advice, if there is none."""
    base = read_settings(folder / CONFIG).base
    if base is None or not Path(base).is_dir():
        problem = "names no base model" if base is None else f"names {base}, which is not a folder"
        raise UserError(f"{folder} {problem}: {advice}")
    return Path(base)


def read_adapter(folder: Path, base: Any, rows: Sequence[Row], weights: WeightSource | None = None) -> PeftAdapter:
    """An adapter of a model. base: the model's config; rows: the table of its family; weights: as `PeftAdapter.base`.

    Raises UserError with all settings and tensors that are not supported or do not match the model.
    """
    settings = read_settings(folder / CONFIG)
    if not (folder / TENSORS).is_file():
        raise UserError(f"{folder} holds no {TENSORS}; other files of adapters can't be read")
    file = SafetensorsFile(folder / TENSORS)
    matrices = declared_by(replace(base, lora=LoRAConfig(rank=1, targets=("*",))))
    supported = {layer.names: layer for layer in adapted_tensors(rows, matrices)}
    present = {names: layer for names, layer in supported.items() if file.entries.keys() & {*names}}
    layers, tables = list(present.values()), _tables(rows, matrices)
    _demand_fit(folder, file, present, settings, tables)
    loras = {layer.module: settings.lora(layer.module) for layer in layers}
    scales = {module: lora.scale() for module, lora in loras.items()}
    largest = max(loras.values(), key=lambda lora: lora.rank)
    paths = [piece.path for layer in layers for piece in layer.tensor.pieces if piece.path + LORA_A in matrices]
    lora = replace(largest, targets=tuple(dict.fromkeys(paths)))
    model = replace(base, lora=lora)
    declared = declared_by(model)
    if weights is not None and (quantizing := Quantizing.if_any(base)) is not None:
        weights = quantizing.inverse(weights)
    adapter = PeftAdapter(str(folder), model, declared, file, layers, scales, weights)
    _demand_zeros(adapter)
    return adapter


def _tables(rows: Sequence[Row], declared: Mapping[str, ParamSpec]) -> set[str]:
    """Modules that are heads or embedding tables, including a tied head, which may have no tensor."""
    tensors = tensors_of(rows, declared)
    tables = [tensor for tensor in tensors if any("vocab" in declared[piece.path].axes for piece in tensor.pieces)]
    return {"lm_head", *(table.name.removesuffix(WEIGHT) for table in tables)}


def _demand_fit(
    folder: Path,
    file: SafetensorsFile,
    present: Mapping[tuple[str, str], Adapted],
    settings: AdapterSettings,
    tables: Collection[str],
) -> None:
    """Raises UserError with all tensors that are missing, unknown, or do not match the model or the settings."""
    names, problems, ranks = {name for pair in present for name in pair}, [], {}
    names |= {layer.vector for layer in present.values() if settings.decomposed}
    for name in file.entries:
        if name not in names:
            problems.append(_unknown(name, names, tables))
        elif not np.issubdtype(dtype := file.entries[name].dtype, np.floating) and dtype.kind != "V":
            problems.append(f"{name}: dtype {dtype.name} is not a floating-point dtype")
    for (a, b), layer in present.items():
        if a not in file.entries or b not in file.entries:
            problems.append(f"{b if a in file.entries else a}: missing")
            continue
        shapes = file.entries[a].shape, file.entries[b].shape
        rank = shapes[0][0] if shapes[0] else 0
        expected = (rank, len(layer.order.inputs)), (len(layer.order.outputs), rank)
        if shapes != expected:
            texts = (f"{first} and {second}" for first, second in (shapes, expected))
            problems.append(f"{a}, {b}: shapes {', but '.join(texts)} by the model")
        ranks[layer.module] = rank
        vector, outputs = file.entries.get(layer.vector), expected[1][:1]
        if settings.decomposed and (vector is None or vector.shape != outputs):
            stored = "missing" if vector is None else f"shape {vector.shape}"
            problems.append(f"{layer.vector}: {stored}, but shape {outputs} by the model and use_dora=true")
    problems += settings.contradictions(ranks)
    if problems or not ranks:
        raise UserError(
            below(f"the tensors of {folder} are not adapters of the model:", problems or ["there are none"])
        )


def _unknown(name: str, names: Collection[str], tables: Collection[str]) -> str:
    """The problem of a tensor that does not belong to a linear layer. names: of tensors that do."""
    if "lora_embedding_" in name or any(name.startswith(f"{PREFIX}{table}.") for table in tables):
        return f"{name}: adapters of heads and tables are not supported"
    numbers = re.findall(r"\d+", name)
    similar = nearest_names(name, [other for other in names if re.findall(r"\d+", other) == numbers], at_most=1)
    return f"{name}: the model has no such layer" + (f"; it has {similar[0]}" if similar else "")


def _demand_zeros(adapter: PeftAdapter) -> None:
    """Raises UserError if an adapter changes weights that can't have an adapter."""
    for layer in adapter.layers:
        for piece, columns in layer.columns():
            if piece.path + LORA_A not in adapter.declared:
                of_piece = (layer.order.outputs >= columns.start) & (layer.order.outputs < columns.stop)
                if adapter.model.lora.decomposed or adapter.file.read(layer.names[1])[of_piece].any():
                    raise UserError(f"{adapter.where}: {layer.names[1]} adapts {piece.path}, which has no adapter here")


def adapter_files(
    model: Any, family: Family, weights: WeightSource, base: str | None
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """(adapter_config.json, tensors by name) of a model with adapters.

    family: of the base model; weights: a source with the adapters and, for DoRA, the base weights in floats; base: name
    or folder of the base model, to be recorded. With it, PEFT's AutoPeftModel classes find the base model, by its task
    or else by its class.
    Raises UserError for adapters that PEFT does not support.
    """
    lora, declared, plain = model.lora, declared_by(model), replace(model, lora=None)
    rows, architecture = family.rows(plain), family.config_json(plain)["architectures"][0]
    layers = adapted_tensors(rows, declared)
    _demand_adapters(layers, declared)
    tensors: dict[str, np.ndarray] = {}
    ranks: dict[str, int] = {}
    for layer in layers:
        a, b = _joined(layer, weights, declared)
        tensors |= dict(zip(layer.names, (a, b), strict=True))
        ranks[layer.module] = len(a)
        if lora.decomposed:
            tensors[layer.vector] = _magnitudes(layer, weights, declared)
    linear = [tensor.name.removesuffix(WEIGHT) for tensor in tensors_of(rows, declared) if tensor.name.endswith(WEIGHT)]
    patterns = {layer.module: _pattern(layer.module, linear, ranks) for layer in layers}
    larger = {patterns[module]: rank for module, rank in ranks.items() if rank != lora.rank}
    alphas = {pattern: lora.scale() * (rank**0.5 if lora.rank_stabilized else rank) for pattern, rank in larger.items()}
    config = {
        "peft_type": "LORA",
        "task_type": family.task or None,
        "auto_mapping": None if family.task else {"base_model_class": architecture, "parent_library": "transformers"},
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": _number(lora.alpha),
        "lora_dropout": lora.dropout,
        "use_rslora": lora.rank_stabilized,
        "use_dora": lora.decomposed,
        "target_modules": sorted(set(patterns.values())),
        "rank_pattern": larger,
        "alpha_pattern": {pattern: _number(alpha) for pattern, alpha in alphas.items()},
        "bias": "none",
        "fan_in_fan_out": any(layer.order.conv1d for layer in layers),
        "inference_mode": True,
        "modules_to_save": None,
    }
    return config, tensors


def _joined(layer: Adapted, weights: WeightSource, declared: Mapping[str, ParamSpec]) -> tuple[np.ndarray, np.ndarray]:
    """The two tensors of an adapter. Weights with different A get blocks of their own, so their ranks add up."""
    parts = []
    for piece, columns in layer.columns():
        if piece.path + LORA_A in declared:
            a, b = (_part(weights, piece, piece.path + end) for end in (LORA_A, LORA_B))
            parts.append((a.reshape(-1, a.shape[-1]), b.reshape(b.shape[0], -1), columns))
    first = parts[0][0]
    shared = all(np.array_equal(a, first) for a, _, _ in parts)
    inputs = first if shared else np.concatenate([a for a, _, _ in parts], axis=1)
    outputs = np.zeros((inputs.shape[1], layer.stops[-1]), first.dtype)
    for number, (a, b, columns) in enumerate(parts):
        row = 0 if shared else number * a.shape[1]
        outputs[row : row + len(b), columns] = b
    return np.ascontiguousarray(inputs[layer.order.inputs].T), np.ascontiguousarray(outputs[:, layer.order.outputs].T)


def _magnitudes(layer: Adapted, weights: WeightSource, declared: Mapping[str, ParamSpec]) -> np.ndarray:
    """The tensor of magnitudes: norms of the columns of the base weights plus their trained changes."""
    parts = []
    for piece, _ in layer.columns():
        if piece.path + LORA_A not in declared:
            raise UserError(f"PEFT has one DoRA adapter for all of {layer.tensor.name}, and {piece.path} has none")
        norms = norms_of(_part(weights, piece, piece.path), declared[piece.path + LORA_A])
        change = _part(weights, piece, piece.path + MAGNITUDE)
        parts.append((norms + change).reshape(-1))
    return np.concatenate(parts)[layer.order.outputs]


def _part(weights: WeightSource, piece: WeightPiece, path: str) -> np.ndarray:
    lead = [slice(int(i), int(i) + 1) for i in piece.index if not isinstance(i, slice)]
    rest = weights.shapes[path][len(lead) :]
    return weights.read(path, (*lead, *[slice(0, size) for size in rest])).reshape(rest)


def _pattern(module: str, linear: Sequence[str], adapted: Mapping[str, int]) -> str:
    """The last part of a module's name if it matches only modules with adapters of this rank, else the full name."""
    last = module.rpartition(".")[2]
    matches = [name for name in linear if name == last or name.endswith(f".{last}")]
    return last if all(adapted.get(name) == adapted[module] for name in matches) else module


def _number(value: float) -> float:
    return int(value) if value == int(value) else value


def norms_of(w: np.ndarray, spec: ParamSpec) -> np.ndarray:
    """Norms over the inputs of a matrix without leading dimensions, float32 [*outputs]. spec: of its A."""
    inputs = tuple(range(len(spec.axes) - leading(spec) - 1))
    return np.sqrt(np.sum(np.square(w, dtype=np.float32), axis=inputs))
