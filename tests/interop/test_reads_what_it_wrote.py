"""Every format gives back what was written in it: each kind of model, in each format that can hold it.

A new family is a row of `MODELS`, a new format one of `FORMS`. Names and orders of other libraries have tests of their
own; here both directions of every table meet.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from hugging_face_folders import random_weights
from megatron_folders import MODELS as OF_MEGATRON
from test_families_of_presets import FAMILIES, twin
from test_hugging_face_decoders import CASES, TINY, read
from test_huggingface_encoders import CONFIGS, described

from megajax.checkpoint.weight_source import WeightSource, converted
from megajax.config.errors import UserError
from megajax.interop import conversion
from megajax.interop.huggingface.registry import families
from megajax.interop.megatron.checkpoints.format import model_config
from megajax.interop.peft.folder import read_adapter
from megajax.interop.weights.adapters import JoinedWeights, MergedWeights
from megajax.interop.weights.foreign import declared_by
from megajax.interop.weights.model_differences import differences
from megajax.interop.weights.quantize_on_load import Quantizing
from megajax.interop.weights.stored_model import Options, StoredModel
from megajax.interop.weights.weights_config import weights_config
from megajax.layers.lora.config import LoRAConfig
from megajax.layers.quantization.config import QuantizationConfig
from megajax.models.protocol import ids_below
from megajax.tokenizers.config import NullTokenizerConfig

PRESETS = ("bert:bert_base_debug", "squad:debug", "t5:debug")
TOWERS = ("vit, tower", "clip", "clip, both", "siglip")
MODELS: dict[str, Callable[[], Any]] = {
    **{name: lambda name=name: read(name, **{**TINY, **CASES[name][0]}) for name in CASES},
    **{name: lambda name=name: described(CONFIGS[name]).model for name in CONFIGS if name not in TOWERS},
    **{f"{name} of Megatron-LM": lambda name=name: model_config(*OF_MEGATRON[name]) for name in OF_MEGATRON},
    **{name: lambda name=name: twin(name) for name in PRESETS},
}
"""Tiny models as config.json or the arguments of Megatron-LM describe them, and the debug twins of presets."""


class Form(NamedTuple):
    """A format, and what a model has there."""

    prefix: str
    options: Options = Options()
    change: Callable[[Any], Any] = lambda model: model


def quantized(**settings: Any) -> Form:
    return Form("", change=lambda model: replace(model, quantization=QuantizationConfig(**settings)))


LORA = LoRAConfig(rank=2, alpha=6.0, targets=("*.mixer.*",))
FORMS = {
    "run": Form(""),
    "run in bfloat16": Form("", Options(dtype=jnp.dtype(jnp.bfloat16))),
    "run with adapters": Form("", change=lambda model: replace(model, lora=LORA)),
    "hf": Form("hf:"),
    "megatron": Form("megatron:"),
    "megatron of plain torch": Form("megatron:", Options(family="local")),
    "peft": Form("peft:", change=lambda model: replace(model, lora=LORA)),
    **{kind: quantized(weights=kind) for kind in ("int8", "fp8", "fp8_blocks")},
    "int4": quantized(weights="int4", group=2),
    "nf4": quantized(weights="nf4", group=2, double=True),
}
IN_MEGATRON = {
    "deepseek_v2", "gpt2", "llama", "megatron", "mistral", "mixtral", "phi3", "qwen2", "qwen2_moe", "qwen3",
    "qwen3_moe",
    *(name for name in MODELS if name.endswith(" of Megatron-LM")),
}  # fmt: skip
ODD = {
    "deepseek_v2", "deepseek_v3", "gpt2, unscaled", "mamba", "mamba, wider", "mt5", "nemotron", "nemotron, MLPs", "t5",
    "t5 1.1", "t5, silu", "qwen3_5_moe_text", "qwen3_next",
}  # fmt: skip
"""Models with matrices of an odd number of inputs, two of which would be one byte of 4-bit numbers."""
ONLY_MEGATRON = {f"{name} of Megatron-LM" for name in OF_MEGATRON.keys() - {"gpt", "llama", "mixtral", "windows"}}
REFUSED: dict[str, tuple[set[str], str]] = {
    "hf": (ONLY_MEGATRON, "no family of Hugging Face models can express"),
    "megatron": ({*MODELS} - IN_MEGATRON, "Megatron-LM's arguments can't express the model"),
    "megatron of plain torch": (
        {*MODELS} - IN_MEGATRON | {"t5 of Megatron-LM"},
        "Megatron-LM's arguments can't express the model",
    ),
    "int4": (ODD, "are odd, and two are packed"),
    "nf4": (ODD, "are odd, and two are packed"),
}
"""Format -> models that it can't hold, and what it says."""


def stored(form: Form, model: Any, folder: Path) -> StoredModel:
    """The model as the format has it, with random weights, also in rows past the vocabulary."""
    changed = form.change(model)
    quantizing = Quantizing.if_any(changed)
    plain = random_weights(declared_by(changed if quantizing is None else model), scale=0.1)
    weights: WeightSource = plain if quantizing is None else quantizing.weights(plain)

    def config(run: Path, files: Any) -> Any:
        return weights_config(changed, NullTokenizerConfig(vocabulary_size=64), run)

    return StoredModel(model=changed, weights=weights, files=folder, config=config)


QUICK = {
    ("run", "mixtral"), ("run in bfloat16", "bert"), ("run with adapters", "gpt2"), ("peft", "gpt2"),
    ("peft", "llama"), ("hf", "vit"), ("hf", "t5 1.1"), ("hf", "mamba"), ("hf", "llava"), ("hf", "clip, classes"),
    ("int8", "t5"), ("fp8_blocks", "mamba2"), ("nf4", "llama"), ("int4", "mamba"), ("megatron", "vit"),
}  # fmt: skip
QUICK_OF_HF = ["llama", "mixtral", "qwen2_moe", "qwen3_next", "deepseek_v3", "gpt_oss", "phi3", "bert:bert_base_debug"]


def family(name: str) -> str:
    """The family of a model among those of Hugging Face; empty: the plainest that fits."""
    of_config = CONFIGS[name]["model_type"] if name in CONFIGS else FAMILIES.get(name, "")
    return name if name in CASES else of_config


KINDS = {"llama", "mixtral", "deepseek_v3", "qwen3_next", "mamba2", "t5 1.1", "vit"}
"""Models that have every kind of layer, for formats whose code depends on kinds alone."""
FEW = {"mixtral", "qwen3_next"}
HELD = {
    **{"hf": {*MODELS} - ONLY_MEGATRON | {"gated of Megatron-LM"}, "megatron": IN_MEGATRON | {"vit", "mamba2"}},
    **{"run in bfloat16": FEW, "fp8": FEW, "fp8_blocks": FEW},
}
"""Format -> models; few where it differs from another one in a number, whatever the kind of layer."""


def cases() -> list[Any]:
    """Every model in the formats with tables of names. tests/oracle/test_decoders.py has further families."""
    all_cases = [case for case in product(FORMS, MODELS) if case in QUICK or case[1] in HELD.get(case[0], KINDS)]
    all_cases = [case for case in all_cases if case[0] != "peft" or family(case[1])]
    quick = {*product(["hf"], QUICK_OF_HF), *product(["megatron"], ["llama", "mixtral", "deepseek_v2"])} | QUICK
    return [pytest.param(*case, marks=() if case in quick else pytest.mark.slow) for case in all_cases]


@pytest.mark.parametrize(("form", "name"), cases())
def test_a_format_gives_back_what_was_written(form: str, name: str, tmp_path: Path) -> None:
    model, (prefix, options, _) = MODELS[name](), FORMS[form]
    options = replace(options, family=family(name)) if prefix in ("hf:", "peft:") else options
    target, (names, message) = f"{prefix}{tmp_path}/new", REFUSED.get(form, (set(), ""))
    if name in names:
        with pytest.raises(UserError, match=message):
            conversion.write(stored(FORMS[form], model, tmp_path), target, options, lambda elements: None)
        assert not (tmp_path / "new").exists()
        return
    source = stored(FORMS[form], model, tmp_path)
    conversion.write(source, target, options, lambda elements: None)
    assert conversion.verify(source, target, options, lambda elements: None).startswith("verified: ")
    if prefix == "peft:":
        adapter = read_adapter(tmp_path / "new", model, families()[family(name)].rows(model), source.weights)
        assert adapter.model.lora.scale() == LORA.scale()
        joined = MergedWeights(JoinedWeights(source.weights, adapter), adapter.model)
        for path, box in boxes(joined, source).items():  # Matrices that are one there have the ranks of all.
            expected = MergedWeights(source.weights, source.model).read(path, box)
            np.testing.assert_allclose(joined.read(path, box), expected, atol=1e-6, err_msg=path)
        return
    back = conversion.open_source(target)
    assert not differences(source.model, back.model)
    assert form != "hf" or family(name) in (back.model.family, "")
    copy = back.fitted(source.declared)
    assert all(source.declared[path].updater is not None for path in source.declared.keys() - copy.shapes.keys())
    for path, box in boxes(copy, source).items():
        actual = copy.read(path, box)
        expected = converted(source.weights.read(path, box), actual.dtype, path)
        np.testing.assert_array_equal(actual, expected, err_msg=path)


def boxes(copy: WeightSource, source: StoredModel) -> dict[str, Any]:
    """What a copy has of each weight: without rows past the vocabulary. Some formats have a part of observations."""
    tokens, found = ids_below(source.model), {}
    for path, spec in source.declared.items():
        if path in copy.shapes and spec.updater is None:
            sizes = zip(spec.axes, copy.shapes[path], strict=True)
            found[path] = tuple(slice(0, tokens if axis == "vocab" else size) for axis, size in sizes)
    return found


@pytest.mark.parametrize("name", TOWERS)
def test_tables_of_towers_are_read_in_both_directions(name: str) -> None:
    """A tower is written and trained with the rest of a model alone."""
    draw = np.random.default_rng(0)
    for tensor in described(CONFIGS[name]).table:
        values = draw.standard_normal(tensor.shape(), np.float32)
        np.testing.assert_array_equal(tensor.from_weights(tensor.to_weights(values)), values, err_msg=tensor.name)
