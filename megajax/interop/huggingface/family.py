"""A family of Hugging Face models: conversion between config.json and a model config, and a table of tensor names.

Settings without effect on a forward pass are kept for an export, and ignored otherwise. A family that reads one of them
takes it first. Settings that change what any implementation of a model computes, such as a scale, a cap, a norm or a
type of positions, are not among them.
"""

import json
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from math import inf, isfinite, nan
from typing import Any, Literal, NamedTuple

from megajax.config.errors import UserError
from megajax.config.hints import below
from megajax.interop.weights.name_mapping import Row
from megajax.layers.stack.config import blocks_of
from megajax.models.decoder.config import DecoderConfig
from megajax.models.protocol import ModelConfig
from megajax.models.vision.config import VisionTowerConfig

LARGEST = 2**31 - 1
LARGEST_FLOAT = sys.float_info.max
VALUE_LENGTH = 40
"""Largest number of characters of a wrong value in a message."""

MOST_LAYERS = 10_000
"""More layers are an error in the file, and would take long to build."""
KINDS: Mapping[type, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "true or false"),
    int: ((int,), "a whole number"),
    float: ((int, float), "a finite number"),
    str: ((str,), "a text"),
    list: ((list, tuple), "a list"),
    tuple: ((list, tuple), "a list"),
    dict: ((dict,), "a mapping of settings"),
}
"""Kind of a setting -> types of its values, and their description."""
_PLACEHOLDERS: Mapping[type, Any] = {bool: False, int: 1, float: 1.0, str: "", list: [], tuple: [], dict: {}}
"""Kind of a setting -> value that replaces a wrong one, so that all errors are reported together."""


def _requirement(value: Any, kind: type) -> str:
    """The requirement that a value violates; "" if it is of the kind."""
    types, description = KINDS.get(kind, ((object,), ""))
    fits = isinstance(value, types) and (kind is bool or not isinstance(value, bool) or object in types)
    if fits and kind is float:
        fits = -LARGEST_FLOAT <= value <= LARGEST_FLOAT
    if fits and kind is int:
        fits = abs(value) <= LARGEST
        description = description if fits else f"a whole number up to {LARGEST}"
    return "" if fits else description


SPECIAL, SPECIAL_FLOATS = "__float__", {"Infinity": inf, "-Infinity": -inf, "NaN": nan}
"""transformers 5 writes such a float as {"__float__": "Infinity"}; older versions wrote it bare, which is no JSON."""


def read_floats(value: object) -> Any:
    """A setting, or a list of them, with the floats that transformers 5 writes as mappings."""
    if isinstance(value, list):
        return [read_floats(item) for item in value]
    is_special = isinstance(value, dict) and value.keys() == {SPECIAL}
    return SPECIAL_FLOATS.get(str(value[SPECIAL]), value) if is_special else value


def written_floats(value: object) -> Any:
    """A setting with floats that JSON does not have as transformers 5 writes them."""
    if isinstance(value, dict):
        return {name: written_floats(item) for name, item in value.items()}
    if isinstance(value, list):
        return [written_floats(item) for item in value]
    if not isinstance(value, float) or isfinite(value):
        return value
    return {SPECIAL: next((name for name, special in SPECIAL_FLOATS.items() if special == value), "NaN")}


def _to_text(value: object) -> str:
    """A value as shortened JSON, which distinguishes "5" from 5."""
    text = json.dumps(value)
    return text if len(text) <= VALUE_LENGTH else f"{text[:VALUE_LENGTH]}…"


type Activation = Literal["gelu", "gelu_tanh", "quick_gelu", "relu", "squared_relu", "silu"]
ACTIVATIONS: Mapping[str, Activation] = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "squared_relu",
    "silu": "silu",
    "swish": "silu",
}
"""Activation functions: name in transformers -> name here."""


def activation_name(activation: str) -> str:
    """The first name in transformers of an activation function; its own if a family names it otherwise."""
    return next((name for name, value in ACTIVATIONS.items() if value == activation), activation)


def layers_of(model: ModelConfig | VisionTowerConfig) -> tuple[Any, ...]:
    """The block of each layer of a decoder."""
    return blocks_of(model.stack)


def final_norm(model: DecoderConfig) -> Any:
    """The norm after the last block; a model of transformers has one with an epsilon."""
    return model.norm


type Names = Mapping[str, tuple[str, Any]]
"""Field of a layer config -> setting in config.json, and its default."""


def to_settings(layer: Any, names: Names) -> dict[str, Any]:
    """The settings in config.json of a layer config; the reverse of `Settings.fields`."""
    return {setting: getattr(layer, field) for field, (setting, _) in names.items()}


class Findings(NamedTuple):
    """What a config.json and its nested mappings were found to hold."""

    problems: list[str]
    """Wrong values, unsupported values and unknown settings, a line each."""
    unknown: dict[str, Any]
    """Settings that no family reads, by name; off and known ones are not among them."""
    untaken: list[str]
    """Names of all settings that were not taken."""


class Settings:
    """A config.json whose settings are taken one by one.

    `finish` reports all wrong values, unsupported values and settings that were not taken together.
    """

    def __init__(self, values: Mapping[str, Any], where: str = "config.json", path: str = ""):
        """path: before the names of settings in messages, such as text_config. with the dot."""
        self.remaining, self.where, self._path = dict(values), where, path
        self.findings = Findings([], {}, [])
        self._assumed: dict[str, Any] = {}
        self._spelled: dict[str, str] = {}

    def rename(self, names: Mapping[str, str]) -> None:
        """Settings by other names. names: in config.json and in messages -> here."""
        for spelled, name in names.items():
            if spelled in self.remaining:
                self.remaining[name] = self.remaining.pop(spelled)
            self._spelled[name] = spelled

    def _named(self, name: str) -> str:
        """The name of a setting in messages."""
        return self._path + self._spelled.get(name, name)

    def assume(self, defaults: Mapping[str, Any]) -> None:
        """Defaults of absent settings. A setting that is null stays null."""
        self.remaining = {**defaults, **self.remaining}
        self._assumed |= defaults

    def take(self, name: str, default: Any = None, kind: type | None = None) -> Any:
        """A setting; the default if it is absent or null. A value of another kind is reported, 1 is also 1.0.

        kind: of the value; object allows any. None: the kind of the default, or of the assumed value.
        """
        fallback = self._assumed.get(name) if default is None else default
        value = read_floats(self.remaining.pop(name, None))
        if value is None:
            return default
        expected = kind or (object if fallback is None else type(fallback))
        if requirement := _requirement(value, expected):
            self.refuse(name, _to_text(value), f"must be {requirement}")
            return fallback if fallback is not None else _PLACEHOLDERS.get(expected)
        return float(value) if expected is float else value

    def count(self, name: str, default: int | None = None, most: int = LARGEST) -> int:
        """A whole number from 1 to `most`. Any other value is reported, and 1 is returned."""
        value = self.need(name, int) if default is None else self.take(name, default, int)
        if not 1 <= value <= most:
            self.refuse(name, _to_text(value), f"must be between 1 and {most}")
            return 1
        return value

    def layers(self, name: str = "num_hidden_layers", default: int | None = None) -> int:
        """A number of layers."""
        return self.count(name, default, MOST_LAYERS)

    def only(self, name: str, *allowed: Any) -> Any:
        """A setting that must have one of these values; the first is the default."""
        value = self.take(name, allowed[0], object)
        if value not in allowed:
            self.refuse(name, value, f"only {' or '.join(map(str, allowed))} is supported")
            return allowed[0]
        return value

    def choose(self, name: str, default: str, choices: Mapping[str, Any]) -> Any:
        """The choice that a setting names."""
        value = self.take(name, default)
        if value not in choices:
            self.refuse(name, value, f"only {', '.join(choices)} is supported")
            return choices[default]
        return choices[value]

    def activation(self, name: str, default: str) -> Activation:
        """The activation function that a setting names."""
        return self.choose(name, default, ACTIVATIONS)

    def fields(self, names: Names) -> dict[str, Any]:
        """Fields of a layer config."""
        return {field: self.take(name, default) for field, (name, default) in names.items()}

    def part(self, name: str, values: Mapping[str, Any] | None = None) -> "Settings":
        """A nested mapping of settings, empty if it is absent. Its findings are added to those of this one.

        values: instead of the setting's own.
        """
        values = self.take(name, {}) if values is None else values
        inner = Settings(values, f"{self.where}: {name}", f"{self._path}{name}.")
        inner.findings = self.findings
        return inner

    def need(self, name: str, kind: type | None = None) -> Any:
        """A required setting. A missing one is reported, and the assumed value is returned.

        kind: see `take`. Raises UserError if no value was assumed.
        """
        if (value := self.take(name, kind=kind)) is not None:
            return value
        fallback = self._assumed.get(name, _PLACEHOLDERS.get(kind or object))
        if fallback is None:
            raise UserError(f"{self.where} has no {name}")
        self.findings.problems.append(f"{self._named(name)}: must be given")
        return fallback

    def peek(self, name: str) -> Any:
        """Like `need`, but the setting can be taken again."""
        value = self.remaining[name] = self.need(name)
        return value

    def refuse(self, name: str, value: object, reason: str) -> None:
        """Reports a wrong or unsupported value."""
        self.findings.problems.append(f"{self._named(name)}={value}: {reason}")

    def close(self, unused: Collection[str] = ()) -> None:
        """Finds the remaining settings that are unknown: not off, and without a match in the patterns `unused`."""
        self.findings.untaken.extend(map(self._named, self.remaining))
        for name, value in self.remaining.items():
            if value not in (None, False, [], {}) and not is_unused(self._spelled.get(name, name), unused):
                self.findings.unknown[self._named(name)] = value

    def architecture(self) -> str:
        """The first of `architectures`, or ""."""
        return next(iter(self.remaining.get("architectures") or ()), "")

    def finish(self, unused: Collection[str] = (), ignore: Collection[str] = ()) -> dict[str, Any]:
        """Raises UserError with all problems, see `close`.

        ignore: patterns of unknown settings that are accepted. Returns those with their values.
        """
        self.close(unused)
        problems, unknown, untaken = self.findings
        accepted = {name: value for name, value in unknown.items() if any(fnmatchcase(name, p) for p in ignore)}
        refused = [name for name in unknown if name not in accepted]
        lines = [*problems, *[f"{name}={unknown[name]}: this setting is not supported" for name in refused]]
        for pattern in ignore:
            if pattern != "*" and not any(fnmatchcase(name, pattern) for name in untaken):
                lines.append(f"{pattern}: is to be ignored, but no unknown setting has this name")
        if lines:
            names = ",".join(refused)
            advice = f"\nTo accept settings without effect: --ignore={names} (train: --checkpoint.ignore={names})"
            advice = advice if refused else ""
            raise UserError(below(f"{self.where} has wrong or unsupported settings:", lines) + advice)
        return accepted


UNREADABLE = ArithmeticError, AttributeError, LookupError, TypeError, ValueError
"""Errors of values of other types than a family expects."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """Models that share a table of names."""

    name: str
    """Name of the family, and model_type in a config.json that is written."""
    architecture: str
    """Class in transformers: `architectures` in a config.json that is written."""
    read: Callable[[Settings], Any]
    """config.json -> model config. It reports unsupported values to the settings, and need not call `finish`."""
    write: Callable[[Any], dict[str, Any]]
    """Model config -> settings of config.json. It may lose settings; the caller compares the result of `read`."""
    rows: Callable[[Any], Sequence[Row]]
    """Model config -> the table of names."""
    adjusted: Callable[[Any, Collection[str]], Any] = lambda model, names: model
    """(model config, names of the tensors in the files) -> the model config without parts that config.json declares
    but the files do not have."""
    unused: frozenset[str] = frozenset()
    """Patterns of further settings of config.json without effect on a forward pass."""
    ignored: tuple[str, ...] = ()
    """Patterns of names of tensors outside of the table that hold no weights, such as tables of rotary angles, or
    weights that the model does not have."""
    task: str = ""
    """task_type of PEFT; "": it has none for these models, or PEFT 0.21 can't load it with transformers 5 (T5)."""
    extra: tuple[str, ...] = ()
    """Patterns of those of them that an export keeps: layers of a released model that the model here does not read."""
    extra_settings: tuple[str, ...] = ()
    """Settings in config.json that describe them: with others, they are not exported."""
    renamed: tuple[tuple[str, str], ...] = ()
    """Regular expression -> replacement, applied in order to names of tensors in files, for classes with other prefixes
    than the table and for older names."""
    copies: Mapping[str, str] = field(default_factory=dict)
    """Name of a tensor that may be stored as a copy of another -> name of the original."""
    heads: Mapping[str, str] = field(default_factory=dict)
    """Head -> table that it is tied to, like `copies`. If the values of the two differ, the model is untied, as
    transformers does."""
    other_types: tuple[str, ...] = ()
    """Further values of model_type that are read."""

    @property
    def model_types(self) -> tuple[str, ...]:
        return (self.name, *self.other_types)

    def name_in_table(self, stored_name: str) -> str:
        """The name in the table of a tensor in a file."""
        for pattern, replacement in self.renamed:
            stored_name = re.sub(pattern, replacement, stored_name)
        return stored_name

    def model_of(self, settings: Settings) -> Any:
        """The model config. Raises UserError for values that can't be read."""
        try:
            return self.read(settings)
        except UNREADABLE as error:
            problem = f"{settings.where} can't be read as {self.name} ({error})"
            raise UserError(below(problem, settings.findings.problems)) from error

    def config_json(self, model: Any) -> dict[str, Any]:
        """The config.json of a model config (see `write`)."""
        return {"model_type": self.name, "architectures": [self.architecture], **self.write(model)}


UNUSED = frozenset({
    # Generation, initial values, dropout, caches, files and other heads.
    "architectures", "attention_dropout", "attn_pdrop", "auto_map", "cache_implementation", "dtype", "embd_pdrop",
    "hidden_dropout", "id2label", "initializer_factor", "initializer_range", "is_decoder", "is_encoder_decoder",
    "keys_to_ignore_at_inference", "label2id", "max_new_tokens", "model_type", "num_labels", "predict_special_tokens",
    "pretraining_tp", "problem_type", "processor_class", "resid_pdrop", "task_specific_params", "tokenizer_class",
    "torch_dtype", "use_bfloat16", "use_cache",
    # Settings of preprocessor_config.json, which families of vision models read.
    "image_mean", "image_std", "size",
    # Older versions of transformers wrote all settings of generation and of outputs into config.json.
    "bad_words_ids", "begin_suppress_tokens", "chunk_size_feed_forward", "diversity_penalty", "do_sample",
    "early_stopping", "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "finetuning_task",
    "length_penalty", "max_length", "min_length", "no_repeat_ngram_size", "num_beam_groups", "num_beams",
    "num_return_sequences", "output_attentions", "output_hidden_states", "output_past", "output_scores", "prefix",
    "remove_invalid_values", "repetition_penalty", "return_dict", "return_dict_in_generate", "suppress_tokens",
    "temperature", "tf_legacy_loss", "top_k", "top_p", "torchscript", "typical_p",
    # The implementation of attention and of kernels.
    "attn_implementation", "flash_attention", "use_flash_attention", "use_flash_attention_2", "use_flash_attn",
    "use_liger_kernel", "use_sdpa",
    # Training: noise that is added to embeddings in training only, recomputation, lengths of rows, names and notes.
    "base_model", "base_model_name_or_path", "bf16", "fp16", "fp32", "gradient_checkpointing",
    "gradient_checkpointing_kwargs", "max_seq_length", "max_sequence_length", "model_id", "model_max_length",
    "model_name", "model_name_or_path", "name_or_path", "neftune_noise_alpha", "tokenizer_model_max_length",
    "tokenizer_name", "tokenizer_name_or_path", "tokenizer_padding_side", "unsloth_fixed", "use_unsloth",
    # Other runtimes and libraries that keep their own settings here.
    "neuron", "sentence_transformers", "transformers.js_config",
})  # fmt: skip
PATTERNS = ("_*", "*_version", "*_token_id")
"""Private fields of transformers and its users, versions of libraries, and ids of tokens for generation."""


def is_unused(name: str, patterns: Collection[str] = ()) -> bool:
    """Whether a setting that no family reads is known to have no effect. patterns: of further names without effect."""
    return name in UNUSED or any(fnmatchcase(name, pattern) for pattern in (*PATTERNS, *patterns))


def linear(tensor: str, path: str) -> list[Row]:
    """A matrix (out, in) and its bias."""
    return [Row(f"{tensor}.weight", path, "o i -> i o"), Row(f"{tensor}.bias", f"{path}_bias")]


def dense(tensor: str, path: str) -> list[Row]:
    """A matrix (out, in) and its bias, in a module of their own."""
    return [Row(f"{tensor}.weight", f"{path}.matrix", "o i -> i o"), Row(f"{tensor}.bias", f"{path}.bias")]


def norm(tensor: str, path: str) -> list[Row]:
    """Gain and bias."""
    return [Row(f"{tensor}.weight", f"{path}.gain"), Row(f"{tensor}.bias", f"{path}.bias")]


def attention(tensor: str, path: str, names: Sequence[str]) -> list[Row]:
    """names: of query, key, value and output in the other library."""
    *inputs, output = (f"{tensor}.{name}" for name in names)
    pairs = list(zip(inputs, ("query", "key", "value"), strict=True))
    return [
        *[Row(f"{name}.weight", f"{path}.{part}", "(n h) d -> d n h") for name, part in pairs],
        *[Row(f"{name}.bias", f"{path}.{part}_bias", "(n h) -> n h") for name, part in pairs],
        Row(f"{output}.weight", f"{path}.output", "d (n h) -> n h d"),
        Row(f"{output}.bias", f"{path}.output_bias"),
    ]


def tokens(cfg: DecoderConfig, table: str, head: str) -> list[Row]:
    """The embedding table and the head, without the rows that pad the vocabulary."""
    index = (slice(0, cfg.vocabulary_size),)
    return [Row(table, "tokens", index=index), Row(head, "head", index=index)]


def patches(tensor: str, path: str, side: int) -> Row:
    """A convolution whose stride is its size, `side`: (channels out, channels in, rows, columns)."""
    return Row(tensor, path, "d c y x -> (y x c) d", sizes={"y": side, "x": side})


def classes(settings: Settings) -> int:
    """Number of classes of a classifier: the number of names in id2label, or else num_labels (default 2)."""
    count, names = settings.take("num_labels", 2), settings.remaining.get("id2label")
    return len(names) if names else count


def class_settings(count: int) -> dict[str, Any]:
    """The reverse of `classes`."""
    names = {str(number): f"LABEL_{number}" for number in range(count)}
    return {"id2label": names, "label2id": {name: int(number) for number, name in names.items()}}
