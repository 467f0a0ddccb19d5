"""What a family of Hugging Face models is: its config.json as a model config of ours and back, and a table of names."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from megajax.checkpoint.tensor_table import Row
from megajax.config.errors import UserError

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


type Names = Mapping[str, tuple[str, Any]]
"""Our setting of a layer -> theirs, and its default."""


def written(layer: Any, names: Names) -> dict[str, Any]:
    """The settings of a config.json that say what a layer of ours is; the reverse of `Settings.fields`."""
    return {theirs: getattr(layer, ours) for ours, (theirs, _) in names.items()}


class Settings:
    """A config.json whose settings are taken one by one; what nothing took, or has a value that is not supported, is
    reported all at once by `finish`."""

    def __init__(self, values: Mapping[str, Any], where: str = "config.json"):
        self.left, self.where, self.problems = dict(values), where, list[str]()

    def assume(self, defaults: Mapping[str, Any]) -> None:
        """Values of settings that are absent. One that is null stays so."""
        self.left = {**defaults, **self.left}

    def take(self, name: str, default: Any = None) -> Any:
        """A setting; the default where it is absent or null."""
        value = self.left.pop(name, None)
        return default if value is None else value

    def only(self, name: str, *allowed: Any) -> Any:
        """A setting that must have one of these values; the first is the default."""
        value = self.take(name, allowed[0])
        if value not in allowed:
            self.refuse(name, value, f"only {' or '.join(map(str, allowed))} can be had")
            return allowed[0]
        return value

    def choose(self, name: str, default: str, choices: Mapping[str, Any]) -> Any:
        """What a setting stands for."""
        value = self.take(name, default)
        if value not in choices:
            self.refuse(name, value, f"only {', '.join(choices)} can be had")
            return choices[default]
        return choices[value]

    def fields(self, names: Names) -> dict[str, Any]:
        """Settings of a layer of ours."""
        return {ours: self.take(name, default) for ours, (name, default) in names.items()}

    def part(self, name: str) -> "Settings":
        """A nested mapping of settings, whose problems are this one's too; an empty one where it is absent."""
        inner = Settings(self.take(name, {}), f"{self.where}: {name}")
        inner.problems = self.problems
        return inner

    def need(self, name: str) -> Any:
        """A setting that must be there."""
        if (value := self.take(name)) is None:
            raise UserError(f"{self.where} has no {name}")
        return value

    def refuse(self, name: str, value: Any, why: str) -> None:
        """Reports a feature that we lack."""
        self.problems.append(f"{name}={value}: {why}")

    def close(self, ignored: Collection[str] = ()) -> None:
        """Reports what is left. Settings that are off, or match a pattern of `ignored`, do no harm."""
        for name, value in self.left.items():
            harmless = name in UNUSED or any(fnmatchcase(name, each) for each in ignored)
            if not harmless and value not in (None, False, [], {}):
                self.refuse(name, value, "this setting is not supported")

    def architecture(self) -> str:
        """The first of `architectures`, "" if none is given."""
        return next(iter(self.left.get("architectures") or ()), "")

    def finish(self, ignored: Collection[str] = ()) -> None:
        """Raises UserError with everything that can't be had, see `close`."""
        self.close(ignored)
        if self.problems:
            lines = "\n".join(f"  {problem}" for problem in self.problems)
            raise UserError(f"{self.where} has features that MegaJAX lacks:\n{lines}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """Models that share a table. The three functions are given, and give, the whole model."""

    name: str
    model_types: tuple[str, ...]
    """Values of model_type in config.json."""
    model: Callable[[Settings], Any]
    """config.json -> our model config. What is not supported is reported to the settings; it need not call `finish`."""
    settings: Callable[[Any], dict[str, Any]]
    """Our model config -> config.json, with model_type and architectures. It may lose what `model` would not give
    back; the caller compares."""
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
