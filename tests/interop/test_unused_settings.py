"""Settings of config.json without an effect: known ones are kept, others are accepted by name only."""

import json
from pathlib import Path
from typing import Any

import pytest
from hugging_face_folders import LLAMA, write_llama
from user_errors import user_error

from megajax import convert
from megajax.config.errors import ConfigError, UserError
from megajax.inference.config import GenerationConfig
from megajax.interop.huggingface.family import UNUSED, is_unused
from megajax.interop.huggingface.folder import model_of
from megajax.interop.weights.fit import weights_of
from megajax.interop.weights.formats import Reading, open_stored
from megajax.interop.weights.origin import generation_config, origin_of

OF_FINE_TUNES: dict[str, Any] = {
    **{"unsloth_version": "2024.11.7", "unsloth_fixed": True, "model_name": "llama-mine", "axolotl_version": "0.9"},
    **{"_attn_implementation_autoset": True, "attn_implementation": "flash_attention_2", "neftune_noise_alpha": 5.0},
    **{
        "_name_or_path": "base",
        "_commit_hash": "0f",
        "_pre_quantization_dtype": "bfloat16",
        "_flash_attn_2_enabled": 1,
    },
    **{"gradient_checkpointing": True, "tokenizer_padding_side": "right", "max_sequence_length": 2048},
    **{"use_flash_attention": True, "eot_token_id": 3, "keys_to_ignore_at_inference": ["past_key_values"]},
    **{"transformers.js_config": {"dtype": "q4"}, "neuron": {"tp_degree": 2}, "cache_implementation": "static"},
}
"""Settings left by fine-tuning and export programs."""
OF_MODELS = (
    "attention_multiplier", "attn_logit_softcapping", "attn_scale", "clip_qkv", "embedding_multiplier",
    "final_logit_softcapping", "hidden_act", "layer_types", "logit_scale", "logits_scaling", "mlp_multiplier",
    "no_rope_layers", "num_experts", "num_key_value_heads", "partial_rotary_factor", "position_embedding_type",
    "qk_layernorm", "query_pre_attn_scalar", "residual_multiplier", "rms_norm_eps", "rope_local_base_freq",
    "rope_parameters", "rope_scaling", "rope_theta", "rope_type", "rotary_pct", "sliding_window", "swiglu_limit",
    "sliding_window_pattern", "tie_word_embeddings", "use_alibi", "use_parallel_residual", "use_qk_norm", "alibi",
    "attn_config", "dual_chunk_attention_config", "expert_layer_period", "norm_topk_prob", "parallel_attn",
    "scale_attn_weights", "use_mrope",
)  # fmt: skip
"""Settings that change the outputs of some model."""


def message(folder: Path, *ignore: str) -> str:
    with pytest.raises(UserError) as error:
        model_of(folder, ignore)
    return str(error.value)


def test_no_setting_of_a_model_counts_as_harmless() -> None:
    assert [name for name in OF_MODELS if is_unused(name)] == []
    assert [name for name in OF_FINE_TUNES if not is_unused(name)] == []
    assert not any("rope" in name or "norm" in name.split("_")[0] or "expert" in name for name in UNUSED)


def test_settings_of_fine_tunes_are_kept_and_ignored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_llama(tmp_path / "given", **OF_FINE_TUNES)
    text = json.dumps({**LLAMA, **OF_FINE_TUNES}, indent=2) + "\n"
    (tmp_path / "given/config.json").write_text(text)
    assert convert.main([f"--from=hf:{tmp_path / 'given'}", f"--to={tmp_path / 'run'}"]) == 0
    assert "ignored" not in capsys.readouterr().out
    assert convert.main([f"--from={tmp_path / 'run'}", f"--to=hf:{tmp_path / 'back'}", "--verify"]) == 0
    assert (tmp_path / "back/config.json").read_text() == text
    write_llama(tmp_path / "plain")
    assert model_of(tmp_path / "given") == model_of(tmp_path / "plain")


def test_unknown_settings_are_accepted_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rope = {"type": "linear", "factor": 2, "a": 1}
    write_llama(tmp_path / "given", group_size_ratio=0.25, notes={"by": "me"}, rope_scaling=rope)
    source, names = f"--from=hf:{tmp_path / 'given'}", "rope_scaling.a,group_size_ratio,notes"
    with pytest.raises(UserError) as refused:
        convert.main([source, f"--to={tmp_path / 'run'}"])
    assert str(refused.value).endswith(f"--ignore={names} (train: --checkpoint.ignore={names})")
    assert "\n  notes={'by': 'me'}: this setting is not supported\n" in str(refused.value)
    with user_error():
        convert.main([source, f"--to={tmp_path / 'run'}", "--ignore=group_size_ratio", "--ignore=rope_scaling.a"])
    flags = ["--ignore=group_size_ratio,notes", "--ignore=rope_scaling.*", "--verify"]
    assert convert.main([source, f"--to={tmp_path / 'run'}", *flags]) == 0
    out, err = capsys.readouterr()
    assert "ignored settings: rope_scaling.a=1, group_size_ratio=0.25, notes={'by': 'me'}\n" in out
    assert "more than once" not in err
    assert convert.main([f"--from={tmp_path / 'run'}", f"--to=hf:{tmp_path / 'back'}", "--verify"]) == 0
    before, after = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("given", "back"))
    assert before == after


def test_ignored_names_have_to_be_unknown_settings(tmp_path: Path) -> None:
    write_llama(tmp_path / "given", unsloth_version="1")
    assert model_of(tmp_path / "given", ["unsloth_version"])
    assert "\n  typo: is to be ignored, but no unknown setting has this name" in message(tmp_path / "given", "typo")
    assert "\n  hidden_act: is to be ignored, but" in message(tmp_path / "given", "hidden_act")
    write_llama(tmp_path / "wrong", hidden_act="mish")
    text = message(tmp_path / "wrong", "*")
    assert "hidden_act=mish: only" in text and "To accept" not in text
    flags = {"run": tmp_path, "hf": None, "adapter": None, "trust_code": False, "ignore": ("typo",)}
    with user_error("--ignore", kind=ConfigError):
        origin_of(flags)
    with user_error("--ignore", kind=ConfigError):
        convert.main([f"--from={tmp_path / 'run'}", f"--to=hf:{tmp_path / 'back'}", "--ignore=typo"])


def test_nested_settings_have_their_full_name(tmp_path: Path) -> None:
    text = {**LLAMA, "vocab_size": 40000, "max_position_embeddings": 64, "depth_scale": 2.0, "_version": 1}
    vision = {"hidden_size": 24, "width_scale": 0.5}
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llava", "text_config": text, "vision_config": vision, "glue": "x"})
    )
    listing = message(tmp_path)
    for name in ("text_config.depth_scale=2.0", "vision_config.width_scale=0.5", "glue=x"):
        assert f"\n  {name}: this setting is not supported" in listing
    assert model_of(tmp_path, ["*_config.*_scale", "glue"]) is not None


def test_generation_accepts_the_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Generation and the server, by their origin. Evaluations and training have their own tests."""
    write_llama(tmp_path / "given", depth_scale=2.0)
    name, reading = f"hf:{tmp_path / 'given'}", Reading(ignore=("depth_scale",))
    config = generation_config(name, GenerationConfig, reading).base
    assert weights_of(open_stored(name, reading), config.model).shapes
    assert "ignored settings: depth_scale=2.0" in capsys.readouterr().err
    with user_error():
        generation_config(name, GenerationConfig)
