"""What a family of Hugging Face models is: its config.json as a model config of ours and back, and a table of names."""

import json
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from megajax.checkpoint.weights.tensor_table import Row
from megajax.config.errors import UserError
from megajax.layers.segments import blocks_of

LARGEST = 2**31 - 1
LARGEST_FLOAT = sys.float_info.max
SHOWN = 40
"""Characters of a wrong value in a message."""
UNUSED = frozenset({
    # About generation, initial values, dropout, caches, files and other heads: nothing that a forward pass computes.
    "_name_or_path", "architectures", "attention_dropout", "attn_pdrop", "auto_map", "bos_token_id", "cls_token_id",
    "decoder_start_token_id", "dtype", "embd_pdrop", "eos_token_id", "forced_eos_token_id", "id2label",
    "initializer_factor", "initializer_range", "is_decoder", "is_encoder_decoder", "label2id", "max_new_tokens",
    "model_type", "pad_token_id", "pretraining_tp", "problem_type", "resid_pdrop", "sep_token_id",
    "task_specific_params", "tokenizer_class", "torch_dtype", "transformers_version", "unk_token_id", "use_cache",
    # Read by families that see images; taken from preprocessor_config.json.
    "image_mean", "image_std",
    # Older versions of transformers wrote all settings of generation, and of outputs, into config.json.
    "bad_words_ids", "begin_suppress_tokens", "chunk_size_feed_forward", "diversity_penalty", "do_sample",
    "early_stopping", "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "finetuning_task",
    "forced_bos_token_id", "length_penalty", "max_length", "min_length", "no_repeat_ngram_size", "num_beam_groups",
    "num_beams", "num_return_sequences", "output_attentions", "output_hidden_states", "output_scores", "prefix",
    "remove_invalid_values", "repetition_penalty", "return_dict", "return_dict_in_generate", "suppress_tokens",
    "temperature", "tf_legacy_loss", "top_k", "top_p", "torchscript", "typical_p",
})  # fmt: skip


MOST_LAYERS = 10_000
"""More are a mistake, and would take long."""
KINDS: Mapping[type, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "true or false"),
    int: ((int,), "a whole number"),
    float: ((int, float), "a finite number"),
    str: ((str,), "a text"),
    list: ((list, tuple), "a list"),
    tuple: ((list, tuple), "a list"),
    dict: ((dict,), "a mapping of settings"),
}
"""Kind of a setting -> types of its values, and in words."""
_SOME: Mapping[type, Any] = {bool: False, int: 1, float: 1.0, str: "", list: [], tuple: [], dict: {}}
"""A value of a kind, to read on with behind one that is wrong."""


def _fault(value: Any, kind: type) -> str:
    """What a value must be and is not; "" if it is of the kind."""
    types, words = KINDS.get(kind, ((object,), ""))
    fits = isinstance(value, types) and (kind is bool or not isinstance(value, bool) or object in types)
    if fits and kind is float:
        fits = -LARGEST_FLOAT <= value <= LARGEST_FLOAT
    if fits and kind is int:
        fits = abs(value) <= LARGEST
        words = words if fits else f"a whole number up to {LARGEST}"
    return "" if fits else words


def _shown(value: Any) -> str:
    """As JSON, which tells texts from numbers, shortened."""
    text = json.dumps(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


ACTIVATIONS: Mapping[str, str] = {
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
    """The first of the names in transformers for one of ours."""
    return next(name for name, ours in ACTIVATIONS.items() if ours == activation)


def layers_of(model: Any) -> tuple[Any, ...]:
    """The block of each layer of a decoder."""
    return blocks_of(model.stack)


type Names = Mapping[str, tuple[str, Any]]
"""Our setting of a layer -> theirs, and its default."""


def written(layer: Any, names: Names) -> dict[str, Any]:
    """The settings of a config.json that say what a layer of ours is; the reverse of `Settings.fields`."""
    return {theirs: getattr(layer, ours) for ours, (theirs, _) in names.items()}


class Settings:
    """A config.json whose settings are taken one by one; what nothing took, or has a value that is not supported, is
    reported all at once by `finish`."""

    def __init__(self, values: Mapping[str, Any], where: str = "config.json"):
        self.remaining, self.where, self.problems = dict(values), where, list[str]()
        self._assumed: dict[str, Any] = {}

    def assume(self, defaults: Mapping[str, Any]) -> None:
        """Values of settings that are absent. One that is null stays so."""
        self.remaining = {**defaults, **self.remaining}
        self._assumed |= defaults

    def take(self, name: str, default: Any = None, kind: type | None = None) -> Any:
        """A setting; the default where it is absent or null, and where it is of another kind, which is reported.

        kind: of the value; object is any. None: that of the default, or of the value that was assumed.
        """
        usual = self._assumed.get(name) if default is None else default
        value = self.remaining.pop(name, None)
        if value is None:
            return default
        wanted = kind or (object if usual is None else type(usual))
        if fault := _fault(value, wanted):
            self.refuse(name, _shown(value), f"must be {fault}")
            return usual if usual is not None else _SOME.get(wanted)
        return value

    def count(self, name: str, default: int | None = None, most: int = LARGEST) -> int:
        """A whole number from 1 to `most`; 1 where it is none or absent, which is reported."""
        value = self.need(name, int) if default is None else self.take(name, default, int)
        if not 1 <= value <= most:
            self.refuse(name, _shown(value), f"must be between 1 and {most}")
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
        """What a setting stands for."""
        value = self.take(name, default)
        if value not in choices:
            self.refuse(name, value, f"only {', '.join(choices)} is supported")
            return choices[default]
        return choices[value]

    def activation(self, name: str, default: str) -> str:
        """The activation function that a setting names."""
        return self.choose(name, default, ACTIVATIONS)

    def fields(self, names: Names) -> dict[str, Any]:
        """Settings of a layer of ours."""
        return {ours: self.take(name, default) for ours, (name, default) in names.items()}

    def part(self, name: str) -> "Settings":
        """A nested mapping of settings, whose problems are this one's too; an empty one where it is absent."""
        inner = Settings(self.take(name, {}), f"{self.where}: {name}")
        inner.problems = self.problems
        return inner

    def need(self, name: str, kind: type | None = None) -> Any:
        """A setting that must be there: one that is not is reported, and has the value that was assumed.

        kind: see `take`. Raises UserError where no value was assumed.
        """
        if (value := self.take(name, kind=kind)) is not None:
            return value
        instead = self._assumed.get(name, _SOME.get(kind or object))
        if instead is None:
            raise UserError(f"{self.where} has no {name}")
        self.problems.append(f"{name}: must be given")
        return instead

    def peek(self, name: str) -> Any:
        """As `need`; the setting can be taken again."""
        value = self.remaining[name] = self.need(name)
        return value

    def refuse(self, name: str, value: Any, why: str) -> None:
        """Reports a feature that we lack."""
        self.problems.append(f"{name}={value}: {why}")

    def close(self, ignored: Collection[str] = ()) -> None:
        """Reports what is left. Settings that are off, or match a pattern of `ignored`, do no harm."""
        for name, value in self.remaining.items():
            harmless = name in UNUSED or any(fnmatchcase(name, each) for each in ignored)
            if not harmless and value not in (None, False, [], {}):
                self.refuse(name, value, "this setting is not supported")

    def architecture(self) -> str:
        """The first of `architectures`, "" if none is given."""
        return next(iter(self.remaining.get("architectures") or ()), "")

    def finish(self, ignored: Collection[str] = ()) -> None:
        """Raises UserError with everything that is not supported, see `close`."""
        self.close(ignored)
        if self.problems:
            lines = "\n".join(f"  {problem}" for problem in self.problems)
            raise UserError(f"{self.where} has settings that are wrong, or that MegaJAX does not support:\n{lines}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """Models that share a table of names."""

    name: str
    """Also the model_type of a config.json that is written."""
    architecture: str
    """Class in transformers, `architectures` of a config.json that is written."""
    read: Callable[[Settings], Any]
    """config.json -> our model config. What is not supported is reported to the settings; it need not call `finish`."""
    write: Callable[[Any], dict[str, Any]]
    """Our model config -> settings of config.json. It may lose what `read` would not give back; the caller compares."""
    rows: Callable[[Any], Sequence[Row]]
    """Our model config -> the table of names."""
    adjusted: Callable[[Any, Collection[str]], Any] = lambda model, names: model
    """(model config, names of the tensors that are there) -> the model config, without parts that config.json names and
    no tensor is of."""
    unused: frozenset[str] = frozenset()
    """Patterns of further settings of config.json that change nothing that a forward pass computes."""
    ignored: tuple[str, ...] = ()
    """Patterns of names of tensors that hold no weights, such as tables of rotary angles, or weights that the model
    does not have; never those of the table."""
    renamed: tuple[tuple[str, str], ...] = ()
    """Regular expression -> replacement, applied in order to names of tensors in files: for classes whose names have
    other prefixes than the table, and for older names."""
    copies: Mapping[str, str] = field(default_factory=dict)
    """Name of a tensor that may stand beside the one it is a copy of -> that one."""
    heads: Mapping[str, str] = field(default_factory=dict)
    """The same for heads of models whose config.json ties them. Where they differ from the table, transformers does not
    tie them, and the model is untied."""
    other_types: tuple[str, ...] = ()
    """Further values of model_type that are read."""

    @property
    def model_types(self) -> tuple[str, ...]:
        return (self.name, *self.other_types)

    def config_json(self, model: Any) -> dict[str, Any]:
        """The config.json of a model config, see `write`."""
        return {"model_type": self.name, "architectures": [self.architecture], **self.write(model)}
