"""Families other than Llama's: round trips of config.json and tensors, names of transformers, copies, refusals.

The names and shapes are those of checkpoints on the Hub, with small sizes.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hugging_face_folders import Arrays
from safetensors.numpy import save_file
from user_errors import user_error

from megajax.config.errors import UserError
from megajax.interop import conversion
from megajax.interop.huggingface.family import Settings
from megajax.interop.huggingface.folder import model_of, rename_tensors
from megajax.interop.huggingface.registry import families, family_of, lost_settings
from megajax.interop.weights.foreign import declared_by, demand_fit
from megajax.interop.weights.name_mapping import MappedTensor, resolved
from megajax.layers.norm.config import IdentityNormConfig
from megajax.models.presets import llama, vit
from megajax.models.presets.vit import llava
from megajax.tokenizers.config import (
    HuggingFaceTokenizerConfig,
    NullTokenizerConfig,
    SentencePieceTokenizerConfig,
    WordPieceTokenizerConfig,
)
from megajax.tokenizers.tokenizer_files import tokenizer_config

TOWER = {"hidden_size": 8, "intermediate_size": 10, "num_hidden_layers": 2, "num_attention_heads": 2}
PIXELS = {"image_size": 8, "patch_size": 4}
TEXT = {**TOWER, "vocab_size": 11, "max_position_embeddings": 16}
GPT2 = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 2, "n_positions": 6, "vocab_size": 11}
MAMBA2 = {
    "model_type": "mamba2", "hidden_size": 8, "num_heads": 4, "head_dim": 4, "state_size": 3, "n_groups": 2,
    "num_hidden_layers": 2, "vocab_size": 11,
}  # fmt: skip
MAMBA = {"model_type": "mamba", "hidden_size": 8, "state_size": 3, "num_hidden_layers": 2, "vocab_size": 11}
NEMOTRON = {
    "model_type": "nemotron_h", "hidden_size": 8, "hybrid_override_pattern": "M-M*", "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 3, "intermediate_size": 10, "ssm_state_size": 3, "mamba_num_heads": 4,
    "mamba_head_dim": 4, "n_groups": 2, "vocab_size": 11, "num_hidden_layers": 4,
}  # fmt: skip
BERT = {"model_type": "bert", **TEXT, "architectures": ["BertForPreTraining"]}
T5 = {
    "model_type": "t5", "d_model": 8, "d_kv": 3, "d_ff": 10, "num_layers": 2, "num_decoder_layers": 1, "num_heads": 2,
    "vocab_size": 11, "relative_attention_num_buckets": 4,
}  # fmt: skip
VIT = {"model_type": "vit", **TOWER, **PIXELS, "id2label": {"0": "a", "1": "b", "2": "c"}}
CLIP = {"model_type": "clip_vision_model", **TOWER, **PIXELS}
SIGLIP = {"model_type": "siglip_vision_model", **TOWER, **PIXELS}
LLAVA = {
    "model_type": "llava", "text_config": {"model_type": "llama", **TEXT}, "vision_config": CLIP,
    "image_token_index": 10, "image_seq_length": 4,
}  # fmt: skip
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "gpt2": GPT2,
    "gpt2, scores by layer": {**GPT2, "scale_attn_by_inverse_layer_idx": True, "tie_word_embeddings": False},
    "gpt2, unscaled": {**GPT2, "scale_attn_weights": False, "activation_function": "relu", "n_inner": 5},
    "mamba2": MAMBA2,
    "mamba2, biases": {**MAMBA2, "use_bias": True, "use_conv_bias": False, "tie_word_embeddings": True},
    "mamba2, limits": {**MAMBA2, "time_step_limit": [0.01, {"__float__": "Infinity"}]},
    "mamba": {**MAMBA, "use_bias": True, "use_cache": False},
    "mamba, wider": {**MAMBA, "expand": 3, "time_step_rank": 5, "tie_word_embeddings": False},
    "nemotron": NEMOTRON,
    "nemotron, MLPs": {**NEMOTRON, "layers_block_type": ["mlp", "attention"], "time_step_min": 1e-9},
    "bert": BERT,
    "bert, masked": {**BERT, "architectures": ["BertForMaskedLM"], "hidden_act": "relu", "tie_word_embeddings": False},
    "megatron": {**BERT, "model_type": "megatron-bert"},
    "t5": T5,
    "t5 1.1": {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "t5, silu": {**T5, "feed_forward_proj": "gated-silu", "scale_decoder_outputs": False},
    "mt5": {**T5, "model_type": "mt5"},
    "vit": VIT,
    "vit, tower": {**VIT, "architectures": ["ViTModel"], "image_size": [8, 12], "qkv_bias": False},
    "clip": CLIP,
    "clip, both": {"model_type": "clip", "vision_config": CLIP, "text_config": TEXT, "logit_scale_init_value": 2.6},
    "clip, classes": {"model_type": "clip", "architectures": ["CLIPForImageClassification"], "vision_config": CLIP},
    "siglip": SIGLIP,
    "siglip, classes": {"model_type": "siglip", "architectures": ["SiglipForImageClassification"],
        "vision_config": SIGLIP, "num_labels": 4},
    "llava": LLAVA,
    "llava, windows": {**LLAVA,
        "text_config": {"model_type": "mistral", **TEXT, "num_key_value_heads": 1, "sliding_window": 8}},
    "llava, qwen": {**LLAVA, "text_config": {"model_type": "qwen2", **TEXT, "num_key_value_heads": 2},
        "vision_config": SIGLIP,
        "vision_feature_select_strategy": "full", "vision_feature_layer": -1},
}  # fmt: skip


class Described(NamedTuple):
    model: Any
    table: list[MappedTensor]


def described(config: Mapping[str, Any]) -> Described:
    json_settings = Settings(config)
    family = family_of(json_settings)
    model = family.read(json_settings)
    json_settings.finish(family.unused)
    assert model.problems() == []
    assert lost_settings(model, family) == []
    return Described(model, resolved(family.rows(model), declared_by(model)))


def random(table: list[MappedTensor]) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    return {tensor.name: draw.standard_normal(tensor.shape(), np.float32) for tensor in table}


def layer(prefix: str, matrices: Mapping[str, tuple[int, ...]], biases: bool = True) -> dict[str, tuple[int, ...]]:
    """Names and shapes of linear layers (out, in)."""
    weights = {f"{prefix}{name}.weight": shape for name, shape in matrices.items()}
    return weights | ({f"{prefix}{name}.bias": shape[:1] for name, shape in matrices.items()} if biases else {})


def norms(*names: str) -> dict[str, tuple[int, ...]]:
    return {f"{name}.{part}": (8,) for name in names for part in ("weight", "bias")}


SQUARE, UP, DOWN = (8, 8), (10, 8), (8, 10)
CLIP_LAYER = {
    **layer("encoder.layers.1.self_attn.", {f"{name}_proj": SQUARE for name in ("q", "k", "v", "out")}),
    **layer("encoder.layers.1.mlp.", {"fc1": UP, "fc2": DOWN}),
    **norms("encoder.layers.1.layer_norm1", "encoder.layers.1.layer_norm2", "post_layernorm"),
    "embeddings.patch_embedding.weight": (8, 3, 4, 4),
}
NAMES: Mapping[str, Mapping[str, tuple[int, ...]]] = {
    "gpt2": {"transformer.wte.weight": (11, 8), "transformer.wpe.weight": (6, 8),
        "transformer.h.1.attn.c_attn.weight": (8, 24), "transformer.h.1.attn.c_attn.bias": (24,),
        "transformer.h.1.attn.c_proj.weight": (8, 8), "transformer.h.1.attn.c_proj.bias": (8,),
        "transformer.h.1.mlp.c_fc.weight": (8, 32), "transformer.h.1.mlp.c_fc.bias": (32,),
        "transformer.h.1.mlp.c_proj.weight": (32, 8), "transformer.h.1.mlp.c_proj.bias": (8,),
        **norms("transformer.h.1.ln_1", "transformer.h.1.ln_2", "transformer.ln_f")},
    "mamba2, biases": {"backbone.embeddings.weight": (11, 8), "backbone.layers.1.mixer.A_log": (4,),
        "backbone.layers.1.mixer.D": (4,), "backbone.layers.1.mixer.dt_bias": (4,),
        "backbone.layers.1.mixer.conv1d.weight": (28, 1, 4), "backbone.layers.1.mixer.norm.weight": (16,),
        **layer("backbone.layers.1.mixer.", {"in_proj": (48, 8), "out_proj": (8, 16)}),
        "backbone.layers.1.norm.weight": (8,), "backbone.norm_f.weight": (8,)},
    "mamba": {"backbone.embeddings.weight": (11, 8), "backbone.layers.1.mixer.A_log": (16, 3),
        "backbone.layers.1.mixer.D": (16,), "backbone.layers.1.mixer.conv1d.weight": (16, 1, 4),
        "backbone.layers.1.mixer.conv1d.bias": (16,), "backbone.layers.1.mixer.x_proj.weight": (7, 16),
        **layer("backbone.layers.1.mixer.", {"in_proj": (32, 8), "dt_proj": (16, 1), "out_proj": (8, 16)}),
        "backbone.layers.1.norm.weight": (8,), "backbone.norm_f.weight": (8,)},
    "nemotron": {"backbone.layers.1.mixer.up_proj.weight": (10, 8), "backbone.layers.1.mixer.down_proj.weight": (8, 10),
        "backbone.layers.1.norm.weight": (8,), "backbone.layers.2.mixer.in_proj.weight": (48, 8),
        "backbone.layers.2.mixer.out_proj.weight": (8, 16), "backbone.layers.3.mixer.q_proj.weight": (12, 8),
        "backbone.layers.3.mixer.k_proj.weight": (6, 8), "backbone.layers.3.mixer.v_proj.weight": (6, 8),
        "backbone.layers.3.mixer.o_proj.weight": (8, 12), "backbone.layers.3.norm.weight": (8,),
        "lm_head.weight": (11, 8)},
    "bert": {"bert.embeddings.word_embeddings.weight": (11, 8), "bert.embeddings.position_embeddings.weight": (16, 8),
        "bert.embeddings.token_type_embeddings.weight": (2, 8),
        **layer("bert.encoder.layer.1.attention.self.", dict.fromkeys(("query", "key", "value"), SQUARE)),
        **layer("bert.encoder.layer.1.", {"attention.output.dense": SQUARE, "intermediate.dense": UP}),
        **layer("bert.encoder.layer.1.", {"output.dense": DOWN}),
        **norms("bert.embeddings.LayerNorm", "bert.encoder.layer.1.attention.output.LayerNorm"),
        **norms("bert.encoder.layer.1.output.LayerNorm", "cls.predictions.transform.LayerNorm"),
        **layer("", {"bert.pooler.dense": SQUARE, "cls.predictions.transform.dense": SQUARE}),
        **layer("", {"cls.seq_relationship": (2, 8)}), "cls.predictions.bias": (11,)},
    "megatron": norms("bert.encoder.layer.1.attention.ln", "bert.encoder.layer.1.ln", "bert.encoder.ln"),
    "t5 1.1": {"shared.weight": (11, 8), "lm_head.weight": (11, 8),
        "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight": (4, 2),
        "decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight": (4, 2),
        **layer("encoder.block.1.layer.0.SelfAttention.", dict.fromkeys("qkv", (6, 8)) | {"o": (8, 6)}, False),
        **layer("decoder.block.0.layer.1.EncDecAttention.", dict.fromkeys("qkv", (6, 8)) | {"o": (8, 6)}, False),
        **layer("encoder.block.1.layer.1.DenseReluDense.", {"wi_0": UP, "wi_1": UP, "wo": DOWN}, False),
        **layer("decoder.block.0.layer.2.DenseReluDense.", {"wi_0": UP, "wi_1": UP, "wo": DOWN}, False),
        "decoder.block.0.layer.2.layer_norm.weight": (8,), "encoder.final_layer_norm.weight": (8,)},
    "t5": layer("decoder.block.0.layer.2.DenseReluDense.", {"wi": UP, "wo": DOWN}, False),
    "vit": {"vit.embeddings.cls_token": (1, 1, 8), "vit.embeddings.position_embeddings": (1, 5, 8),
        "vit.embeddings.patch_embeddings.projection.weight": (8, 3, 4, 4),
        "vit.embeddings.patch_embeddings.projection.bias": (8,),
        **layer("vit.encoder.layer.1.attention.attention.", dict.fromkeys(("query", "key", "value"), SQUARE)),
        **layer("vit.encoder.layer.1.", {"attention.output.dense": SQUARE, "intermediate.dense": UP}),
        **layer("vit.encoder.layer.1.", {"output.dense": DOWN}),
        **norms("vit.encoder.layer.1.layernorm_before", "vit.encoder.layer.1.layernorm_after", "vit.layernorm"),
        **layer("", {"classifier": (3, 8)})},
    "clip": {**{f"vision_model.{name}": shape for name, shape in CLIP_LAYER.items()},
        "vision_model.embeddings.class_embedding": (8,), "vision_model.embeddings.position_embedding.weight": (5, 8),
        **norms("vision_model.pre_layrnorm")},
    "siglip": {**{f"vision_model.{name}": shape for name, shape in CLIP_LAYER.items()},
        "vision_model.embeddings.patch_embedding.bias": (8,),
        "vision_model.embeddings.position_embedding.weight": (4, 8)},
    "llava": {"vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight": UP,
        "multi_modal_projector.linear_1.weight": SQUARE, "multi_modal_projector.linear_2.bias": (8,),
        "language_model.model.layers.1.self_attn.q_proj.weight": SQUARE,
        "language_model.model.embed_tokens.weight": (11, 8), "language_model.lm_head.weight": (11, 8)},
}  # fmt: skip


WHOLE = ("gpt2", "mamba", "bert", "vit", "clip", "siglip")
"""Those of all of layer 1."""


@pytest.mark.parametrize("case", NAMES)
def test_names_are_those_of_transformers(case: str) -> None:
    actual = {tensor.name: tensor.shape() for tensor in described(CONFIGS[case]).table}
    assert {name: actual.get(name) for name in NAMES[case]} == NAMES[case]
    layers = {name.partition(".1.")[0] for name in NAMES[case] if ".1." in name and case in WHOLE}
    for prefix in layers:
        inside = [{name for name in each if name.startswith(f"{prefix}.1.")} for each in (actual, NAMES[case])]
        assert inside[0] == inside[1]


def opened(config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> tuple[Any, set[str]]:
    """The model of a config.json with these tensors, which must fit, and the names of its table."""
    json_settings = Settings(config)
    family = family_of(json_settings)
    tensors_by_name, model = rename_tensors(Arrays(tensors), family, family.read(json_settings))
    table = resolved(family.rows(model), declared_by(model))
    demand_fit(tensors_by_name, table, family.ignored)
    return model, {tensor.name for tensor in table}


def test_prefixes_and_buffers_of_the_first_gpt2() -> None:
    tensors = {name.removeprefix("transformer."): w for name, w in random(described(GPT2).table).items()}
    tensors |= {"h.0.attn.bias": np.ones((1, 1, 6, 6), np.float32), "h.0.attn.masked_bias": np.float32([-1e4])[0]}
    model, _ = opened(GPT2, tensors)
    assert model.tied


def test_a_tied_head_may_be_stored_and_is_untied_where_it_differs() -> None:
    tensors = random(described(GPT2).table)
    table = tensors["transformer.wte.weight"]
    assert opened(GPT2, {**tensors, "lm_head.weight": table})[0].tied
    model, names = opened(GPT2, {**tensors, "lm_head.weight": table + 1})
    assert not model.tied
    assert "lm_head.weight" in names
    # The table may be stored under the head's name alone.
    moved = {"lm_head.weight" if name == "transformer.wte.weight" else name: w for name, w in tensors.items()}
    assert opened(GPT2, moved)[0].tied


def test_copies_of_t5() -> None:
    tensors = random(described(T5).table)
    shared, names = tensors["shared.weight"], ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
    assert opened(T5, {**tensors, **dict.fromkeys(names, shared)})[0].tied
    without_table = {name: w for name, w in tensors.items() if name != "shared.weight"}
    assert opened(T5, {**without_table, **dict.fromkeys(names, shared), "lm_head.weight": shared})[0].tied
    with user_error():
        opened(T5, {**tensors, names[0]: shared + 1})


def test_older_names_and_copies_of_bert() -> None:
    tensors = random(described(BERT).table)
    renamed = {name.replace("LayerNorm.weight", "LayerNorm.gamma"): w for name, w in tensors.items()}
    renamed = {name.replace("LayerNorm.bias", "LayerNorm.beta"): w for name, w in renamed.items()}
    renamed["cls.predictions.decoder.weight"] = tensors["bert.embeddings.word_embeddings.weight"]
    renamed["cls.predictions.decoder.bias"] = tensors["cls.predictions.bias"]
    renamed["bert.embeddings.position_ids"] = np.arange(16)[None]
    assert opened(BERT, renamed)[0].tied
    # BertForMaskedLM omits the parts that read the first token.
    assert not opened({**BERT, "architectures": ["BertForMaskedLM"]}, renamed)[0].next_sentence


@pytest.mark.parametrize("tie", [True, False])
def test_an_untied_head_of_bert_has_the_bias_that_is_stored(tie: bool) -> None:
    """transformers 5 writes a bias of its own; versions before, one under the name of the tied head's."""
    config = {**BERT, "architectures": ["BertForMaskedLM"], "tie_word_embeddings": tie}
    tensors = random(described({**config, "tie_word_embeddings": False}).table)
    weight, bias, other = (f"cls.predictions.{name}" for name in ("decoder.weight", "decoder.bias", "bias"))
    family = family_of(Settings(config))
    before = {other if name == bias else name: tensor for name, tensor in tensors.items()}
    for stored in (tensors, {**tensors, other: tensors[bias] + 1}, before):
        renamed, model = rename_tensors(Arrays(stored), family, family.read(Settings(config)))
        assert not model.tied and bias in opened(config, stored)[1]
        np.testing.assert_array_equal(renamed.read(bias), tensors[bias])
    without = {name: tensor for name, tensor in before.items() if name != weight}
    if tie:
        assert opened(config, without)[0].tied
    else:
        with user_error():
            opened(config, without)


def test_bert_without_token_types_is_no_model_of_transformers() -> None:
    """Megatron-LM's BERT without a second head has none, and BertModel fails on an empty table."""
    model = replace(described(BERT).model, token_types=0)
    assert lost_settings(model, family_of(Settings(BERT))) == ["token_types: 0 here, 1 there"]


def test_newer_names_of_llava_and_unread_layers() -> None:
    tensors = random(described(LLAVA).table)
    tensors["vision_tower.vision_model.encoder.layers.1.mlp.fc1.weight"] = np.zeros((10, 8), np.float32)
    tensors["vision_tower.vision_model.post_layernorm.weight"] = np.zeros(8, np.float32)
    new = {name.replace("language_model.lm_head", "lm_head"): w for name, w in tensors.items()}
    new = {name.replace("language_model.model", "model.language_model"): w for name, w in new.items()}
    new = {name if name.startswith(("lm_head", "model.")) else f"model.{name}": w for name, w in new.items()}
    assert opened(LLAVA, tensors)[1] == opened(LLAVA, new)[1]


def test_two_tensors_of_one_name_are_an_error() -> None:
    tensors = random(described(GPT2).table)
    with user_error():
        opened(GPT2, {**tensors, "wpe.weight": tensors["transformer.wpe.weight"]})


REFUSED: Mapping[str, tuple[Mapping[str, Any], list[str]]] = {
    "gpt2": ({**GPT2, "activation_function": "mish", "add_cross_attention": True}, ["mish", "add_cross_attention"]),
    "mamba2": ({**MAMBA2, "hidden_act": "gelu", "head_dim": 5}, ["hidden_act=gelu", "num_heads=4"]),
    "nemotron": ({**NEMOTRON, "hybrid_override_pattern": "MEX", "moe_latent_size": 4, "mlp_bias": True},
        ["layers_block_type=X: only ", "mlp_bias=True: only false is supported with moe_latent_size=4"]),
    "bert": ({**BERT, "position_embedding_type": "relative_key", "is_decoder": True},
        ["position_embedding_type=relative_key", "is_decoder=True"]),
    "t5": ({**T5, "feed_forward_proj": "gated-mish", "is_encoder_decoder": False},
        ["gated-mish", "is_encoder_decoder"]),
    "vit": ({**VIT, "num_channels": 1, "patch_size": [4, 2]}, ["num_channels=1", r"patch_size=\[4, 2\]"]),
    "llava": ({**LLAVA, "vision_feature_layer": [-2, -1], "vision_config": {**SIGLIP, "hidden_act": "mish"}},
        ["vision_feature_layer", "vision_feature_select_strategy=default", "hidden_act=mish"]),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_unsupported_features_are_listed_together(case: str) -> None:
    config, expected = REFUSED[case]
    json_settings = Settings(config)
    family = family_of(json_settings)
    family.read(json_settings)
    for each in expected:
        with pytest.raises(UserError, match=each):
            json_settings.finish(family.unused)


def test_presets_can_be_written() -> None:
    tower = vit.clip("l14-336")
    expected_tower = replace(tower, norm=IdentityNormConfig(), stack=replace(tower.stack, repeats=23))
    presets = {
        "vit": (vit.vit("b16"), vit.vit_tower("l14")),
        "clip": (tower,),
        "siglip": (vit.siglip("so400m14"),),
        "llava": (llava(llama.llama2("7b", vocabulary_size=32064), expected_tower, image_token=32000),),
    }
    for name, models in presets.items():
        assert [lost_settings(model, families()[name]) for model in models] == [[]] * len(models)


def test_a_tower_alone_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CLIP), encoding="utf-8")
    save_file(random(described(CLIP).table), tmp_path / "model.safetensors")
    with user_error():
        conversion.open_source(f"hf:{tmp_path}")


def test_pixels_are_normalised_as_the_preprocessor_says(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(VIT), encoding="utf-8")
    colours = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(colours), encoding="utf-8")
    model = model_of(tmp_path)
    assert (model.mean, model.deviation) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))


def test_tokenizers_of_a_folder(tmp_path: Path) -> None:
    run = tmp_path / "run"

    def of(*present: str, **settings: Any) -> Any:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
        return tokenizer_config(present, run, 11, tmp_path)

    json_file = str(run / "tokenizer.json")
    assert of("tokenizer.json", "vocab.txt") == HuggingFaceTokenizerConfig(path=json_file)
    assert of("tokenizer.json", sep_token="[SEP]") == HuggingFaceTokenizerConfig(path=json_file, eod="[SEP]")
    assert of("tokenizer.json", eos_token={"content": "</s>"}).eod == "</s>"
    assert of("vocab.txt", do_lower_case=False) == WordPieceTokenizerConfig(
        vocabulary=str(run / "vocab.txt"), lower=False
    )
    pieces = str(run / "spiece.model")
    assert of("spiece.model") == SentencePieceTokenizerConfig(path=pieces)
    assert of("spiece.model", extra_ids=100) == HuggingFaceTokenizerConfig(path=pieces)
    assert of() == NullTokenizerConfig(vocabulary_size=11)
