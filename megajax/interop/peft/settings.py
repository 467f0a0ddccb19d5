"""The settings of an adapter folder of the PEFT library, and the rank and scale that they give a module.

Patterns match as in PEFT: utils.other.get_pattern_key for ranks and scales, and
tuners.tuners_utils.check_target_module_exists for modules with adapters.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megajax.config.errors import UserError
from megajax.config.hints import below
from megajax.config.read_limits import demanded_settings
from megajax.layers.lora.config import LoRAConfig

CONFIG = "adapter_config.json"
REFUSED: Mapping[str, Any] = {
    # Settings that change the sum x W + scale * (x A) B, or name other weights that were trained.
    "alora_invocation_tokens": None, "arrow_config": None, "bias": "none", "kasa_config": None,
    "layer_replication": None, "lora_bias": False, "modules_to_save": None, "monteclora_config": None,
    "target_parameters": None, "trainable_token_indices": None, "use_bdlora": None, "use_qalora": False,
    "velora_config": None,
}  # fmt: skip
"""Setting -> the only supported value besides absent and null."""
SHIFTING = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Values of init_lora_weights that change the base weights too."""
ALL_LINEAR = "all-linear"
MOST_REPETITIONS = 5
LONGEST_PATTERN = 10_000
REGEX = f"a regular expression with at most {MOST_REPETITIONS} repetitions such as .* in a row, none in another"
PATTERN_TOKEN = re.compile(
    r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|(?P<repeat>(?:[*+?]|\{\d*,?\d*\})[?+]?)|\((?:\?(?:[:=!>]|<[=!]|P?<\w+>))?|.",
    re.DOTALL,
)
"""An escape, a class, a repetition, the beginning of a group, or another character."""
LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class AdapterSettings:
    """Supported settings with valid values."""

    values: Mapping[str, Any]

    @property
    def base(self) -> str | None:
        """Recorded name or folder of the base model."""
        return self.values.get("base_model_name_or_path")

    @property
    def decomposed(self) -> bool:
        """Whether modules have magnitudes (DoRA)."""
        return self.values.get("use_dora") or False

    def rank(self, module: str) -> int:
        return _value_for(self.values.get("rank_pattern"), module, self.values.get("r", 8))

    def lora(self, module: str) -> LoRAConfig:
        """The adapter of a module."""
        return LoRAConfig(
            rank=self.rank(module),
            alpha=float(_value_for(self.values.get("alpha_pattern"), module, self.values.get("lora_alpha", 8))),
            dropout=float(self.values.get("lora_dropout", 0.0)),
            rank_stabilized=self.values.get("use_rslora", False),
            decomposed=self.decomposed,
        )

    def contradictions(self, ranks: Mapping[str, int]) -> list[str]:
        """Contradictions between settings and tensors. ranks: module -> rank of its tensors."""
        problems = dict[str, list[str]]()
        for module, rank in ranks.items():
            if (expected := self.rank(module)) != rank:
                problems.setdefault(f"rank {rank}, but {expected} by r and rank_pattern", []).append(module)
            for name in self._excluding(module):
                problems.setdefault(f"{name}={self.values[name]} excludes it", []).append(module)
        return [
            f"{modules[0]}" + f" and {len(modules) - 1} more" * (len(modules) > 1) + f": {problem}"
            for problem, modules in problems.items()
        ]

    def _excluding(self, module: str) -> Iterator[str]:
        """Settings by which PEFT gives this module no adapter."""
        excluded, targets = self.values.get("exclude_modules"), self.values.get("target_modules")
        if excluded and _matches(excluded, module):
            yield "exclude_modules"
        if targets is None or (isinstance(targets, str) and targets.lower() == ALL_LINEAR):
            return
        if not _matches(targets, module):
            yield "target_modules"
        elif not isinstance(targets, str) and module not in targets and not self._is_in_layers(module):
            yield "layers_to_transform"

    def _is_in_layers(self, module: str) -> bool:
        layers = self.values.get("layers_to_transform")
        if layers in (None, []):
            return True
        patterns = self.values.get("layers_pattern") or [r"[^.]*"]
        patterns = [patterns] if isinstance(patterns, str) else patterns
        number = next(filter(None, (re.match(rf".*\.{pattern}\.(\d+)\.", module) for pattern in patterns)), None)
        return number is not None and int(number.group(1)) in (layers if isinstance(layers, list) else [layers])


def read_settings(path: Path) -> AdapterSettings:
    """Raises one UserError with all unsupported settings and all wrong values."""
    config = demanded_settings(path, "an adapter folder of PEFT")
    allowed = {**REFUSED, "peft_type": "LORA"}
    unsupported = [name for name, value in allowed.items() if config.get(name) not in (None, value, [], {})]
    if str(config.get("init_lora_weights")).startswith(SHIFTING):
        unsupported.append("init_lora_weights")
    parts = {
        "has settings that MegaJAX lacks": [f"{name}={config[name]}" for name in unsupported],
        "has wrong values": [*_wrong_values(config)],
    }
    if text := [below(f"{path} {title}:", lines) for title, lines in parts.items() if lines]:
        raise UserError("\n".join(text))
    return AdapterSettings(config)


def _wrong_values(config: Mapping[str, Any]) -> Iterator[str]:
    kinds = {
        "r": (lambda value: type(value) is int and value > 0, "a whole number above 0"),
        "lora_alpha": (lambda value: _is_number(value) and 0 < value <= LARGEST, "a number above 0"),
        "lora_dropout": (lambda value: _is_number(value) and 0 <= value < 1, "a number at least 0 and below 1"),
        "use_rslora": (lambda value: isinstance(value, bool), "true or false"),
        "use_dora": (lambda value: value is None or isinstance(value, bool), "true or false"),
        "target_modules": (_is_names, f"{REGEX} or a list of names"),
        "exclude_modules": (_is_names, f"{REGEX} or a list of names"),
        "layers_to_transform": (_is_layers, "a whole number or a list of them"),
        "layers_pattern": (_is_patterns, f"{REGEX} or a list of them"),
        "base_model_name_or_path": (lambda value: value is None or isinstance(value, str), "a name"),
    }
    for name, (accepts, description) in kinds.items():
        if name in config and not accepts(config[name]):
            yield f"{name}={json.dumps(config[name])} is not {description}"
    for name, of in (("rank_pattern", "r"), ("alpha_pattern", "lora_alpha")):
        patterns, (accepts, description) = config.get(name), kinds[of]
        if patterns is not None and not isinstance(patterns, dict):
            yield f"{name}={json.dumps(patterns)} is not a mapping of patterns"
            continue
        for pattern, value in (patterns or {}).items():
            if not _is_regex(pattern):
                yield f"{name}: {pattern} is not {REGEX}"
            if not accepts(value):
                yield f"{name}.{pattern}={json.dumps(value)} is not {description}"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_layers(value: object) -> bool:
    layers = value if isinstance(value, list) else [value]
    return value is None or all(type(layer) is int for layer in layers)


def _is_names(value: object) -> bool:
    if isinstance(value, list):
        return all(isinstance(name, str) for name in value)
    return value is None or _is_regex(value)


def _is_patterns(value: object) -> bool:
    return value is None or all(map(_is_regex, value if isinstance(value, list) else [value]))


def _is_regex(value: object) -> bool:
    try:
        # Both forms: "a)|(b" is valid only within brackets.
        if not isinstance(value, str) or len(value) > LONGEST_PATTERN:
            return False
        texts = (value, rf"(.*\.)?({value})$")
        return all(re.compile(text) for text in texts) and _repetitions(value) <= MOST_REPETITIONS
    except (re.error, OverflowError, RecursionError):
        return False


def _repetitions(pattern: str) -> float:
    """Largest number of repetitions of variable length (* + ? {}) in an alternative; infinite if they are nested.

    A match may try all places of each: a pattern like (a+)+b takes 2**n steps, for which `re` has no limit.
    """
    levels = [[0.0]]  # of each open group: repetitions in its alternatives so far
    last = 0.0  # in the atom that a repetition would follow
    for token in PATTERN_TOKEN.finditer(pattern):
        text = token[0]
        if token["repeat"]:
            levels[-1][-1] += math.inf if last and not text.startswith("?") else 1
            last += 1
        elif text.startswith("("):
            levels.append([0.0])
        elif text == "|":
            levels[-1].append(0.0)
        elif text == ")":
            last = max(levels.pop())
            levels[-1][-1] += last
        else:
            last = 0.0
    return max(levels[0])


def _matches(names: str | list[str], module: str) -> bool:
    """Whether a regular expression matches a module's full name, or a list has its name or the end of it."""
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)


def _value_for(patterns: Mapping[str, Any] | None, module: str, default: object) -> Any:
    """The value of the first pattern that matches the end of a name."""
    return next(
        (value for pattern, value in (patterns or {}).items() if re.match(rf"(.*\.)?({pattern})$", module)), default
    )
