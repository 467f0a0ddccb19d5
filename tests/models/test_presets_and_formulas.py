"""Preset sizes and formulas against the arrays of the models and against published figures."""

from collections.abc import Mapping
from dataclasses import replace
from math import prod

import pytest
from flax import nnx
from user_errors import user_error

from megajax.config.compose import problems_of
from megajax.layers.attention.config import AttentionConfig
from megajax.layers.attention.latent_config import LatentAttentionConfig
from megajax.layers.block.config import BlockConfig
from megajax.layers.mlp.config import DenseMLPConfig, GatedMLPConfig
from megajax.layers.norm.config import L2NormConfig, LayerNormConfig, RMSNormConfig
from megajax.layers.param import specs
from megajax.layers.position.config import RelativeBiasConfig
from megajax.layers.stack.config import StackConfig
from megajax.mesh.config import ParallelConfig
from megajax.mesh.layout import Layout
from megajax.mesh.sharding_rules import Plan
from megajax.models.decoder.config import DecoderConfig, PredictionConfig, WidthScalingConfig
from megajax.models.memory import MemorySetting, memory_report
from megajax.models.presets import deepseek, glm, gpt, granite, llama, llama4, qwen, windowed
from megajax.models.presets.hybrids import lfm2, linear_attention, mamba_models

EVERYTHING = DecoderConfig(
    hidden=48,
    vocabulary_size=300,
    sequence_length=20,
    stack=StackConfig(
        pattern=(
            BlockConfig(
                mixer=AttentionConfig(heads=6, kv_heads=2, head_dim=10, bias=True),
                mlp=GatedMLPConfig(ffn=30, bias=True),
            ),
            BlockConfig(mixer=AttentionConfig(heads=4), mlp=GatedMLPConfig(ffn=80)),
        ),
        repeats=3,
    ),
)
"""Settings that no preset has: biases on a gated MLP, its own head size, two kinds of blocks."""

GATED = AttentionConfig(heads=6, kv_heads=2, gate=True, qkv_bias=True, qk_norm=LayerNormConfig(), sink="learned")
BIASED = AttentionConfig(heads=4, qk_norm=L2NormConfig(), relative=RelativeBiasConfig(buckets=8), window=3)
VARIED = replace(
    EVERYTHING,
    stack=StackConfig(
        pattern=(
            BlockConfig(mixer=GATED, mlp=GatedMLPConfig(ffn=30), norm=RMSNormConfig(zero_centred=True)),
            BlockConfig(mixer=BIASED, mlp=DenseMLPConfig(ffn=20, bias=False)),
        ),
        repeats=3,
    ),
    prediction=PredictionConfig(depth=2, block=BlockConfig(mixer=GATED, mlp=GatedMLPConfig(ffn=10))),
)
LATENT = replace(
    EVERYTHING,
    stack=StackConfig(
        pattern=tuple(
            BlockConfig(
                mixer=LatentAttentionConfig(
                    heads=3,
                    query_rank=rank,
                    key_value_rank=8,
                    content_dim=6,
                    position_dim=4,
                    value_dim=5,
                    bias=True,
                    latent_bias=True,
                    norm=norm,
                    sink="learned",
                ),
                mlp=GatedMLPConfig(ffn=30),
            )
            for rank, norm in ((7, RMSNormConfig()), (None, LayerNormConfig()), (9, None))
        ),
        repeats=2,
    ),
)

MODELS = {
    "gpt2 debug": gpt.gpt2("debug"),
    "gpt2 1.5b": gpt.gpt2("1.5b"),
    "gpt3 175b": gpt.gpt3("175b"),
    "llama2 debug": llama.llama2("debug"),
    "llama3 405b": llama.llama3("405b", llama3_scaling=True),
    "everything": EVERYTHING,
    "varied": VARIED,
    "latent": LATENT,
}

MIXTURES = {"gpt-oss debug": windowed.gpt_oss("debug"), "deepseek debug": deepseek.deepseek("debug")}
MODULES = (deepseek, glm, gpt, granite, llama, llama4, qwen, windowed, lfm2, linear_attention, mamba_models)
FAMILIES = {
    name: (make, sizes)
    for module in MODULES
    for name, make in vars(module).items()
    if callable(make) and isinstance(sizes := getattr(module, name.upper(), None), Mapping)
} | {"nemotron3": (mamba_models.nemotron3, mamba_models.NEMOTRON_3)}
"""Name -> a preset's function, and its sizes."""


def preset(name: str) -> DecoderConfig:
    """FAMILY:SIZE."""
    family, _, size = name.partition(":")
    return FAMILIES[family][0](size)


def shapes(cfg: DecoderConfig) -> dict[str, tuple[int, ...]]:
    layout = Layout(Plan.of(ParallelConfig()))
    return {path: spec.shape for path, spec in specs(nnx.eval_shape(lambda: cfg.build(layout))).items()}


@pytest.mark.parametrize("cfg", [*MODELS.values(), *MIXTURES.values()], ids=[*MODELS, *MIXTURES])
def test_parts_of_the_parameter_count_are_those_of_the_arrays(cfg):
    declared = shapes(cfg)
    padding = cfg.hidden * (cfg.padded_vocabulary() - cfg.vocabulary_size)
    tables = {path: prod(declared[path]) for path in ("tokens", "positions", "head") if path in declared}
    count = cfg.parameter_count()
    assert cfg.padded_vocabulary() % 128 == 0
    assert ("head" in tables) is not cfg.tied
    assert count.embedding == tables["tokens"] - padding + tables.get("positions", 0)
    assert count.head == tables.get("head", padding) - padding
    assert count.layers == sum(map(prod, declared.values())) - sum(tables.values())
    assert count.total == count.layers + count.embedding + count.head


RELEASED = """
    gpt2:124m 124439808, gpt2:355m 354823168, gpt2:774m 774030080, gpt2:1.5b 1557611200, llama2:7b 6738415616,
    llama2:13b 13015864320, llama2:70b 68976648192, llama3:8b 8030261248, llama3:70b 70553706496,
    llama3:405b 405853388800, qwen2:0.5b 494032768, qwen2:7b 7615616512, qwen2:72b 72706203648, qwen3:0.6b 596049920,
    qwen3:8b 8190735360, qwen3:14b 14768307200, qwen3:32b 32762123264, mixtral:8x7b 46702792704,
    mixtral:8x22b 140620634112, deepseek:v2-lite 15706484224, qwen3_moe:30b-a3b 30532122624,
    qwen3_moe:235b-a22b 235093634560, qwen3_next:80b-a3b 79674391296, qwen3_5:4b 4205751296, qwen3_5:9b 8953803264,
    qwen3_5:27b 26895998464, qwen3_5_moe:35b-a3b 34660610688, qwen3_5_moe:397b-a17b 396346350336,
    mamba2:130m 128989632, mamba2:2.7b 2702599680, granite:2b 2533531648, granite:8b 8170848256,
    phi3:3-mini 3821079552, phi3:3-medium 13960238080, phi3:4 14659507200, cohere2:7b 8028033024,
    cohere2:111b 111057580032, gemma2:2b 2614341888, gemma2:9b 9241705984, gemma2:27b 27227128320,
    gemma3:270m 268098176, gemma3:1b 999885952, glm4:9b 9400279040, glm4:32b 32566081536, olmoe:1b-7b 6919161856,
    olmo3:7b 7298011136, olmo3:32b 32233522176, exaone4:1.2b 1279391488, exaone4:32b 32003216384,
    smollm3:3b 3075098624, llama4:scout 107769861120, llama4:maverick 400711848960, nemotron3:nano 31577937344,
    nemotron3:super 120668687360, deepseek:moonlight 15960108544, deepseek:kimi-k2 1026408209408,
    falcon_h1:0.5b 521411104, falcon_h1:34b 33642516224, lfm2:8b-a1b 8339929856, lfm2:350m 354483968,
    lfm2:700m 742489344, lfm2:1.2b 1170340608, kimi_linear:48b-a3b 49122675072, minimax_m2:230b-a10b 228689748992,
    granite4:h-tiny 6939037248, granite4:h-small 32207337984, minimax:text-01 456089655296, gpt_oss:20b 20914757184,
    gpt_oss:120b 116829156672
"""
"""Elements in the released weights, of transformers' classes: without towers of images and biases of the choice."""
PUBLISHED = {name: int(count) for name, count in (line.split() for line in RELEASED.split(","))} | {
    # In the release there are biases of the choice, one for each expert of 58 layers.
    "deepseek:v3": 671_026_419_200 - 58 * 256,
    # The tower, and the projection of its width to the hidden size with its norm.
    "gemma3:4b": 4_300_079_472 - 416_866_032 - 1152 * 2561,
    "gemma3:12b": 12_187_325_040 - 416_866_032 - 1152 * 3841,
    "gemma3:27b": 27_432_406_640 - 416_866_032 - 1152 * 5377,
    # Biases of the choice, and the copies of the embedding and the head in the prediction block.
    "glm4_moe:4.5-air": 110_468_824_832 - 46 * 128 - 2 * 151552 * 4096,
    "glm4_moe:4.5": 358_337_791_296 - 90 * 160 - 2 * 151552 * 5120,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_equal_those_of_the_released_weights(name):
    cfg = preset(name)
    cfg = replace(cfg, prediction=None) if name == "deepseek:v3" else cfg
    assert cfg.parameter_count().total == PUBLISHED[name]


@pytest.mark.parametrize(
    ("name", "published", "table"),
    [
        ("mixtral:8x7b", 12.9, True),
        ("mixtral:8x22b", 39.2, True),
        ("qwen3_moe:30b-a3b", 3.4, True),
        ("qwen3_moe:235b-a22b", 22.2, True),
        ("deepseek:v2-lite", 2.5, False),
        ("gpt_oss:20b", 3.61, False),
        ("gpt_oss:120b", 5.13, False),
    ],
)
def test_active_weights_per_token_are_as_published(name, published, table):
    """In billions. DeepSeek and OpenAI count no embedding table; Qwen and DeepSeek-V2 cut 3.35 and 2.45 to 3.3, 2.4."""
    count = preset(name).parameter_count()
    active = count.active - (0 if table else count.embedding)
    assert round(active / 1e9, len(str(published).split(".")[1])) == published


def test_deepseek_v3_predicts_ahead_with_as_many_weights_as_released():
    """README_WEIGHTS.md of the release: 11.5 B, without tables. Without them, 36.6 B are active."""
    whole = preset("deepseek:v3")
    count, main_count = (cfg.parameter_count() for cfg in (whole, replace(whole, prediction=None)))
    assert (count.total - main_count.total) / 1e9 == pytest.approx(11.5, abs=0.15)
    assert round((main_count.active - main_count.embedding) / 1e9, 1) == 36.6


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        *(("mamba2:370m", 0.37), ("mamba2:780m", 0.78), ("mamba2:1.3b", 1.3)),
        *(("nemotron_h:8b", 8.1), ("nemotron_h:56b", 56.3)),
    ],
)
def test_sizes_of_state_space_models_match_their_names(name, billions):
    assert preset(name).parameter_count().total / 1e9 == pytest.approx(billions, rel=0.035)


@pytest.mark.parametrize(("size", "layers"), [("8b", (24, 24, 4)), ("56b", (54, 54, 10))])
def test_nemotron_h_has_the_layers_of_the_paper(size, layers):
    """Table 1 (NVIDIA 2025) counts its Mamba-2, MLP and attention layers."""
    pattern = mamba_models.NEMOTRON_H[size].pattern
    assert tuple(map(pattern.count, "M-*")) == layers
    assert pattern.startswith("M-M-M-M*-M-M-M-M-M*-M-") and pattern.endswith("*-M-M-M-M-M-")
    assert mamba_models.nemotron_h(size).stack.layers() == sum(layers)


@pytest.mark.parametrize("size", [size for size in gpt.GPT3 if size != "debug"])
def test_gpt3_sizes_match_their_names(size):
    """Never released; the paper's names are rounded. 50m is counted with a vocabulary of bytes."""
    nominal = float(size[:-1]) * {"m": 1e6, "b": 1e9}[size[-1]]
    model = gpt.gpt3(size, sequence_length=512, vocabulary_size=257) if size == "50m" else gpt.gpt3(size)
    assert abs(model.parameter_count().total / nominal - 1) < 0.025


@pytest.mark.parametrize("cfg", MODELS.values(), ids=MODELS)
def test_operations_are_six_per_matmul_weight_plus_attention(cfg):
    """2 forward and 4 backward; scores and values are two products of heads x head size with the keys of a query.

    Megatron-LM counts gains of latents too, whether they are there or not, and with further heads three norms.
    """
    in_matmuls = sum(
        prod(shape)
        for path, shape in shapes(cfg).items()
        if path.startswith(("stack", "predictions")) and not path.endswith(("bias", "gain", "sink", "table"))
    )
    heads, length = len(cfg.predicting_blocks()), cfg.sequence_length
    in_matmuls += (1 + heads) * cfg.hidden * cfg.padded_vocabulary()
    gains, full, causal = heads * 3 * cfg.hidden, 0, 0
    for mixer in [block.mixer for block in (*cfg.stack.pattern * cfg.stack.repeats, *cfg.predicting_blocks())]:
        size = mixer.size(cfg.hidden)
        width = mixer.heads * (size + getattr(mixer, "value_dim", size)) / 2
        seen = length if mixer.window is None else mixer.window + 1
        full += 12 * width * length
        causal += 12 * width * sum(min(place, seen) for place in range(1, length + 1)) / length
        if isinstance(mixer, LatentAttentionConfig):
            gains += mixer.key_value_rank + (mixer.query_rank or 0)
    actual = cfg.flops()
    assert actual.full == pytest.approx(6 * in_matmuls + full)
    assert actual.causal == pytest.approx(6 * in_matmuls + causal)
    assert actual.megatron == pytest.approx(6 * (in_matmuls + gains) + full / 2)


def test_a_wider_model_has_smaller_initial_weights_and_scaled_embeddings_and_scores_and_logits():
    """Yang et al. 2022, table 8, for four times the width."""
    block = BlockConfig(mixer=AttentionConfig(heads=4), mlp=GatedMLPConfig(ffn=80))
    plain = replace(EVERYTHING, hidden=64, stack=StackConfig(pattern=(block,), repeats=2), embedding_std=0.5)
    wide = replace(plain, width_scaling=WidthScalingConfig(base_hidden=16, base_head_dim=4, embedding=3.0))
    layout = Layout(Plan.of(ParallelConfig()))
    first, second = (nnx.eval_shape(lambda cfg=cfg: cfg.build(layout)) for cfg in (plain, wide))
    before, after = specs(first), specs(second)
    for path, spec in before.items():
        if spec.role == "weight":
            ratio = 2 if path.startswith("stack") else 1
            assert spec.init.std == pytest.approx(after[path].init.std * ratio), path
    assert before["tokens"].init.std == 0.5 and before["head"].init.std == 0.02
    assert wide.logit_factor() == 1 / 4 and plain.logit_factor() == 1
    assert first.stack.blocks[0].mixer.core.scale == 16**-0.5
    assert second.stack.blocks[0].mixer.core.scale == 4**0.5 / 16


def test_norms_of_further_heads_are_replicated_in_the_memory_report():
    """Megatron-LM's report: tensor parallelism shards matrices and tables only."""
    block = BlockConfig(mixer=AttentionConfig(heads=4), mlp=GatedMLPConfig(ffn=80), norm=RMSNormConfig())
    plain = DecoderConfig(
        hidden=64, vocabulary_size=128, sequence_length=8, stack=StackConfig(pattern=(block,), repeats=2)
    )
    ahead = replace(plain, prediction=PredictionConfig(depth=2))
    first, second = (memory_report(cfg, MemorySetting(tensor=4)).most_loaded for cfg in (plain, ahead))
    assert second - first == 2 * ((4 * 64 * 64 + 3 * 64 * 80) / 4 + 2 * 64)


def test_gpt3_175b_has_the_cost_of_the_paper():
    """Brown et al. 2020, table D.1: 3.14e23 operations for 300 billion tokens, attention left out."""
    assert gpt.gpt3("175b").flops().causal * 300e9 == pytest.approx(3.14e23, rel=0.04)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_preset_is_consistent(name):
    family, sizes = FAMILIES[name]
    for size in sizes:
        assert not problems_of(family(size)), size
    with user_error():
        family("9z")


def test_problems_of_a_model_name_a_remedy():
    block = BlockConfig(mixer=AttentionConfig(heads=5, kv_heads=2), mlp=GatedMLPConfig(ffn=8))
    cfg = DecoderConfig(hidden=64, vocabulary_size=0, sequence_length=4, stack=StackConfig(pattern=(block,), repeats=1))
    text = "\n".join(map(str, problems_of(cfg)))
    assert "vocabulary_size: must be at least 1, got 0" in text
    assert "stack.pattern.0.mixer.heads: hidden=64 is not divisible by heads=5" in text
    assert "divisors near 5: 2, 4, 8" in text
    (problem,) = problems_of(block.mixer)
    assert str(problem).startswith("kv_heads: heads=5 is not a multiple of kv_heads=2")
    assert "1, 5" in problem.hint
