"""What an export says it is: the family of a preset or a source's folder, or the plainest of a hand-written model."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hugging_face_folders import random_weights
from user_errors import user_error

from megajax.config import load
from megajax.interop.huggingface.folder import model_of
from megajax.interop.huggingface.format import chosen_family, config_for, write_model
from megajax.interop.huggingface.registry import WITH_EXPERTS, WITHOUT_EXPERTS, families, lost_settings
from megajax.interop.weights.foreign import declared_by
from megajax.interop.weights.provenance import Provenance
from megajax.models.classifier.config import scoring
from megajax.models.presets.gpt import gpt2
from megajax.models.presets.hybrids.mamba_models import mamba2
from megajax.models.presets.llama import llama3
from megajax.models.presets.qwen import qwen3_moe

CONFIGS = Path(__file__).parents[2] / "configs"
TWINS = """
    bert:bert_base_debug bert, bert:bert_large_debug bert, bert:bert_1_3b_debug megatron-bert,
    bert:bert_3_9b_debug megatron-bert, cohere2:debug cohere2, deepseek:debug deepseek_v3, dpo:debug llama,
    dpo:reward_llama3_8b_debug llama, exaone4:debug exaone4, falcon_h1:debug falcon_h1, gemma:gemma2_2b_debug gemma2,
    gemma:gemma3_1b_debug gemma3_text, glm4:debug glm4, glm4_moe:debug glm4_moe, glue:debug bert,
    glue:glue_stsb_debug bert, gpt2:debug gpt2, gpt3:debug gpt2, gpt_oss:debug gpt_oss, granite:debug granite,
    granite4:debug granitemoehybrid, grpo:debug llama, kimi_linear:debug kimi_linear, lfm2:debug lfm2,
    llama3:debug llama, llama3:llama3_8b_128k_debug llama, llama4:debug llama4_text, llava:debug llava,
    mamba2:debug mamba2, minimax:debug minimax, minimax_m2:debug minimax_m2, mixtral:debug mixtral,
    moonlight:debug deepseek_v3, nemotron3:debug nemotron_h, nemotron_h:debug nemotron_h, olmo2:debug olmo2,
    olmo3:debug olmo3, olmoe:debug olmoe, phi:debug phi3, qwen3_5:qwen3_5_27b_debug qwen3_5_text,
    qwen3_5:qwen3_5_35b_a3b_debug qwen3_5_moe_text, qwen3_moe:debug qwen3_moe, qwen3_next:debug qwen3_next,
    qwen3_vl:debug qwen3_vl, race:debug bert, sft:sft_qwen3_8b_debug qwen3, smollm3:debug smollm3, squad:debug bert,
    t5:debug t5, t5:t5_v1_1_xxl_debug t5, vit:debug vit
"""
FAMILIES = dict(twin.split() for twin in TWINS.split(","))


def twin(name: str) -> Any:
    file, _, function = name.partition(":")
    return scoring(load(f"{CONFIGS / file}.py:{function}").model)


def write(model: Any, folder: Path, **more: Any) -> None:
    """Random weights, as the family that the model is of."""
    folder.mkdir()
    write_model(folder, model, random_weights(declared_by(model), scale=0.1), chosen_family(model)[0], **more)


def test_every_preset_is_exported_as_its_own_family() -> None:
    """Every file of configs/ but those whose models are of another one: two benchmarks, a teacher, LoRA, an example."""
    others = {"bench", "distill", "lora", "quickstart"}
    assert {name.partition(":")[0] for name in FAMILIES} == {path.stem for path in CONFIGS.glob("*.py")} - others
    chosen = {name: chosen_family(twin(name)) for name in FAMILIES}
    assert {name: family.name for name, (family, _) in chosen.items()} == FAMILIES
    assert not [why for _, why in chosen.values() if why]


@pytest.mark.slow
def test_transformers_reads_every_export_as_the_family(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    kinds = {}
    for name in FAMILIES:
        write(twin(name), tmp_path / name)
        kinds[name] = transformers.AutoConfig.from_pretrained(tmp_path / name).model_type
    assert kinds == FAMILIES


def test_a_hand_written_model_is_the_plainest_that_fits() -> None:
    """The order names every family once; others that fit are named; a family that can't be read back never fits."""
    order = [*WITHOUT_EXPERTS.split(), *WITH_EXPERTS.split()]
    assert len(order) == len({*order}) and {*order} == {*families()}
    expected = {
        llama3("debug"): "llama, the plainest that fits; also mistral, phi3, smollm3",
        gpt2("debug"): "gpt2, the plainest that fits; also gpt_bigcode",
        qwen3_moe("debug"): "qwen3_moe, the plainest that fits; also mellum",
    }
    for model, text in expected.items():
        family, why = chosen_family(replace(model, family=""))
        assert family.name == text.partition(",")[0] and why.startswith(f"family: {text}")
    family, why = chosen_family(replace(qwen3_moe("debug"), family="llama"))
    assert family.name == "qwen3_moe" and "the llama of its config would lose layers 0 to 3: mixer.qk_norm" in why
    with user_error("--family"):
        chosen_family(llama3("debug"), "lama")
    assert not lost_settings(gpt2("debug"), families()["gpt_bigcode"])


def test_answers_of_an_exported_t5_begin_as_in_training() -> None:
    """Runs begin the decoder's text with bos; folders of Hugging Face, with the token that their config names."""
    model, special = twin("t5:debug"), {"bos_token_id": 5, "eos_token_id": 6, "pad_token_id": 0}
    family, start = families()["t5"], "decoder_start_token_id"
    written = config_for(model, family, {}, [], special)
    assert {name: written[name] for name in (*special, start)} == {**special, start: 5}
    assert config_for(model, family, {**written, start: 0}, [])[start] == 0
    assert config_for(replace(model, hidden=32), family, {**written, start: 0}, [], special)[start] == 5


SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL |= {"num_key_value_heads": 4, "vocab_size": 40, "max_position_embeddings": 32, "head_dim": 4}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 6, "n_group": 1, "topk_group": 1}
LATENT = {"q_lora_rank": 6, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4}
KIMI = LATENT | ROUTED | {"linear_num_heads": 2, "linear_head_dim": 4, "num_hidden_layers": 4, "q_lora_rank": None}
KIMI |= {"layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"]}
KINDS = {"mlp_layer_types": ["sparse", "dense", "sparse", "dense"]}
SOURCES: dict[str, dict[str, Any]] = {
    "deepseek_v3": LATENT | ROUTED | {"first_k_dense_replace": 2},
    "glm4_moe_lite": LATENT | ROUTED | {"mlp_layer_types": ["dense", "dense"]},
    "glm4_moe": ROUTED | {"first_k_dense_replace": 2},
    "dots1": ROUTED | {"first_k_dense_replace": 2},
    "afmoe": {"num_experts": 4, "num_dense_layers": 2},
    "qwen3_moe": {"num_experts": 4, "mlp_only_layers": [0, 1]},
    "mellum": {"num_local_experts": 4, "mlp_layer_types": ["dense", "dense"]},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_layer_start_index": 2},
    "kimi_linear": KIMI | KINDS,
    "exaone_moe": ROUTED | KINDS | {"num_hidden_layers": 4},
    # Numbers as whole ones, and with a fraction.
    "llama": {"rms_norm_eps": 1, "rope_theta": 10000, "rope_parameters": {"rope_theta": 500000.5}},
    "glm": {"partial_rotary_factor": 1, "rope_parameters": {"rope_theta": 10000, "partial_rotary_factor": 0.5}},
    "gemma3_text": {"rope_local_base_freq": 10000, "rope_theta": 1000000, "query_pre_attn_scalar": 4},
    "granite": {"embedding_multiplier": 2, "logits_scaling": 3, "attention_multiplier": 1, "residual_multiplier": 1},
}


def test_a_family_holds_its_own_experts_without_a_source(tmp_path: Path) -> None:
    settings = {"model_type": "ernie4_5_moe", **SMALL, "moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 1}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    family, why = chosen_family(model_of(tmp_path))
    assert (family.name, why) == ("ernie4_5_moe", "")


@pytest.mark.parametrize("kind", SOURCES)
def test_a_folder_keeps_its_family_and_its_config(kind: str, tmp_path: Path) -> None:
    """All layers without experts, layers of both kinds in any order, and integers for floats."""
    settings = {"model_type": kind, **SMALL, **SOURCES[kind]}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    model = model_of(tmp_path)
    model = replace(model, prediction=None)
    family, why = chosen_family(replace(model, family=""), origin=Provenance(family=kind, settings=settings))
    assert (family.name, why) == (kind, "") and config_for(model, family, settings, []) == settings
    larger = config_for(replace(model, vocabulary_size=48), family, settings, [])
    assert larger == settings | {"vocab_size": 48}


def test_infinities_are_written_as_transformers_does_and_read_in_both_ways(tmp_path: Path) -> None:
    """A config.json whose settings did not change has the bytes of the source, whatever they are."""
    low = mamba2("debug", vocabulary_size=40)
    block = low.stack.pattern[0]
    low = replace(
        low, stack=low.stack.with_pattern([replace(block, mixer=replace(block.mixer, dt_limit=(0.5, np.inf)))])
    )
    write(low, tmp_path / "tagged")
    text = (tmp_path / "tagged/config.json").read_text()
    assert json.loads(text, parse_constant=pytest.fail)["time_step_limit"] == [0.5, {"__float__": "Infinity"}]
    settings = json.loads(text) | {"time_step_limit": [0.5, np.inf]}
    bare = json.dumps(settings, indent=4)
    write(low, tmp_path / "bare", origin=Provenance(settings=settings, text=bare))
    assert (tmp_path / "bare/config.json").read_text() == bare and "Infinity" in bare
    assert model_of(tmp_path / "bare") == model_of(tmp_path / "tagged")
    record = Provenance(settings=settings).record()
    json.dumps(record, allow_nan=False)
    assert Provenance.of_meta({"source": record}, "") == Provenance(settings=settings)
