"""Every flag of Megatron-LM's parser has a row; switches can be turned off; refusals say what to do instead."""

import math
import os
from pathlib import Path

import pytest
from flag_lines import config, convert_line, problem

from megajax.interop.megatron.flags.reading import MappedFlag, Noted, Refused, Unnecessary, spellings
from megajax.interop.megatron.flags.translate import FLAGS, ROWS, convert
from megajax.layers.attention.config import AttentionConfig
from megajax.layers.position.config import RopeConfig, YarnScalingConfig

REPOSITORY = Path(__file__).parents[3]
ORACLE = Path(os.environ.get("MEGAJAX_ORACLE_DIR", REPOSITORY.parent / "shared" / "oracle"))
PARSER = ORACLE.parent / "reference" / "megatron_flags.txt"


def unanswered(names: list[str]) -> list[str]:
    """Flags without a row, by name or as a switch that is turned off."""
    return [problem.setting for problem in convert(names).problems if "not a known flag" in problem.message]


@pytest.mark.skipif(not PARSER.is_file(), reason=f"the names of Megatron-LM's parser are not at {PARSER}")
def test_every_flag_of_the_parser_has_a_row() -> None:
    lines = PARSER.read_text(encoding="utf-8").splitlines()
    first, second = (number for number, text in enumerate(lines) if text.startswith("#"))
    literal = [text for text in lines[first + 1 : second] if text.startswith("--")]
    # One field's name begins with an underscore, so its flag has a third dash.
    generated = [text for text in lines[second + 1 :] if text.startswith("--")]
    assert "---cpu-offloading-context" in generated
    assert (len(literal), len(generated)) == (400, 525)
    assert unanswered(literal) == []
    assert unanswered(generated) == []


def test_no_row_is_lost() -> None:
    """The number of rows, also checked if the list of the parser's flags is missing."""
    kinds = [type(row.fate) for row in FLAGS.values()]
    assert len(FLAGS) == len(ROWS), "a flag has two rows"
    assert len(spellings(FLAGS.values())) == len(FLAGS) + sum(len(row.also) for row in FLAGS.values())
    assert [kinds.count(kind) for kind in (MappedFlag, Unnecessary, Noted, Refused)] == [299, 435, 9, 251]
    assert sum(len(row.also) for row in FLAGS.values()) == 17


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ("--yaml-cfg model.yaml", "give megajax.interop.megatron.args a file of flags and values"),
        ("--inprocess-restart", "python -m megajax.launch"),
        ("--retro-project-dir retro", "retrieval models"),
        ("--img-h 336", "only pretrain_vlm.py has this flag: name it before the flags"),
        ("--freeze-ViT", "or see configs/llava.py"),
        ("--rl-default-top-k 5", "reinforcement learning"),
        ("--grad-reduce-in-bf16 --ddp-reduce-scatter-with-fp32-accumulation", "without --grad-reduce-in-bf16"),
        ("--megatron-fsdp-main-params-dtype bf16", "precision.gradients"),
    ],
)
def test_a_refusal_gives_reason_and_remedy(changes: str, remedy: str) -> None:
    converted = convert_line(changes)
    assert not converted.problems and len(converted.refused) == 1, (converted.problems, converted.refused)
    assert remedy in converted.refused[0][1]


def test_a_switch_can_be_turned_off() -> None:
    assert config("--swiglu --no-swiglu") == config()
    converted = convert_line("--no-perform-rl-step --no-tp-comm-overlap --no-apply-rope-fusion")
    assert not converted.problems and not converted.refused
    assert ("--no-perform-rl-step", "off by default") in converted.unnecessary
    assert {flag for flag, _ in converted.unnecessary} >= {"--no-tp-comm-overlap", "--no-apply-rope-fusion"}
    # Only switches, and only without a value.
    assert "is not a known flag" in problem("--no-hidden-size")
    assert "is not a known flag" in problem("--no-swiglu 1")


def attention(changes: str) -> AttentionConfig:
    mixer = config(changes).model.stack.pattern[0].mixer
    assert isinstance(mixer, AttentionConfig)
    return mixer


def test_yarn_outside_of_latent_attention_is_megatron_lms() -> None:
    """The flags of gpt-oss. Magnitude: (0.1 mscale ln(factor) + 1) / (0.1 mscale_all_dim ln(factor) + 1)."""
    mixer = attention(
        "--position-embedding-type yarn --rotary-base 150000 --rotary-scaling-factor 32.0 --mscale 1.0"
        " --yarn-original-max-position-embeddings 4096 --yarn-beta-fast 32.0 --yarn-beta-slow 1.0"
        " --mscale-all-dim 0.0 --no-yarn-correction-range-round-to-int"
    )
    scaling = YarnScalingConfig(
        factor=32.0, original=4096, fast=32.0, slow=1.0, rounded=False, mscale=1.0, mscale_all=0.0
    )
    assert mixer.rope == RopeConfig(base=150000.0, scaling=scaling)
    assert scaling.magnitude() == pytest.approx(0.1 * math.log(32) + 1)
    # YaRN does not change the scale of scores here.
    assert mixer.scale is None
    plain = attention("--position-embedding-type yarn --use-rotary-position-embeddings --rotary-scaling-factor 4")
    assert plain.rope == RopeConfig(), "Megatron-LM takes plain RoPE for this old flag"


def test_newer_and_older_names_of_one_setting() -> None:
    newer, older = (config(f"{name} --optimizer muon").optimizer for name in ("--muon-nesterov", "--muon-use-nesterov"))
    assert newer == older
    assert config("--no-weight-decay-cond-type qwen3_next").optimizer.decay_qk_norms
    assert "apply_wd_to_qk_layernorm" in problem("--no-weight-decay-cond-type bias")
    assert config("--softmax-scale 0.25").model.stack.pattern[0].mixer.scale == 0.25
    keep_last = {text: config(f"--save s --save-interval 5 {text}").checkpoint.keep_last
            for text in ("", "--most-recent-k 2", "--save-retain-interval 10", "--most-recent-k -1")}  # fmt: skip
    assert list(keep_last.values()) == [None, 2, 1, None]
    zero1 = config("--use-torch-fsdp2 --torch-fsdp2-no-reshard-after-forward")
    assert (zero1.parallel.data_sharding, zero1.model.recompute) == ("zero1", "none")
