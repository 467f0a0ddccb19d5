"""Preset sizes and formulas against the arrays of the models and against published figures."""

from dataclasses import replace
from math import prod

import pytest
from flax import nnx

from megajax.config.compose import problems_of
from megajax.config.errors import UserError
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
from megajax.models.presets.deepseek import DEEPSEEK, deepseek
from megajax.models.presets.glm import GLM4, GLM4_MOE, glm4, glm4_moe
from megajax.models.presets.gpt import GPT2, GPT3, gpt2, gpt3
from megajax.models.presets.granite import GRANITE, GRANITE4, granite, granite4
from megajax.models.presets.hybrids.lfm2 import LFM2, lfm2
from megajax.models.presets.hybrids.linear_attention import (
    KIMI_LINEAR,
    MINIMAX,
    MINIMAX_M2,
    kimi_linear,
    minimax,
    minimax_m2,
)
from megajax.models.presets.hybrids.mamba_models import (
    FALCON_H1,
    MAMBA2,
    NEMOTRON_3,
    NEMOTRON_H,
    falcon_h1,
    mamba2,
    nemotron3,
    nemotron_h,
)
from megajax.models.presets.llama import LLAMA2, LLAMA3, MIXTRAL, PHI3, SMOLLM3, llama2, llama3, mixtral, phi3, smollm3
from megajax.models.presets.llama4 import LLAMA4, llama4
from megajax.models.presets.qwen import (
    QWEN2,
    QWEN3,
    QWEN3_5,
    QWEN3_5_MOE,
    QWEN3_MOE,
    QWEN3_NEXT,
    qwen2,
    qwen3,
    qwen3_5,
    qwen3_5_moe,
    qwen3_moe,
    qwen3_next,
)
from megajax.models.presets.windowed import (
    COHERE2,
    EXAONE4,
    GEMMA2,
    GEMMA3,
    GPT_OSS,
    OLMO3,
    OLMOE,
    cohere2,
    exaone4,
    gemma2,
    gemma3,
    gpt_oss,
    olmo3,
    olmoe,
)

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
    "gpt2 debug": gpt2("debug"),
    "gpt2 1.5b": gpt2("1.5b"),
    "gpt3 175b": gpt3("175b"),
    "llama2 debug": llama2("debug"),
    "llama3 405b": llama3("405b", llama3_scaling=True),
    "everything": EVERYTHING,
    "varied": VARIED,
    "latent": LATENT,
}

MIXTURES = {"gpt-oss debug": gpt_oss("debug"), "deepseek debug": deepseek("debug")}


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


PUBLISHED = {
    "gpt2 124m": (gpt2("124m"), 124_439_808),
    "gpt2 355m": (gpt2("355m"), 354_823_168),
    "gpt2 774m": (gpt2("774m"), 774_030_080),
    "gpt2 1.5b": (gpt2("1.5b"), 1_557_611_200),
    "llama2 7b": (llama2("7b"), 6_738_415_616),
    "llama2 13b": (llama2("13b"), 13_015_864_320),
    "llama2 70b": (llama2("70b"), 68_976_648_192),
    "llama3 8b": (llama3("8b"), 8_030_261_248),
    "llama3 70b": (llama3("70b"), 70_553_706_496),
    "llama3 405b": (llama3("405b"), 405_853_388_800),
    "qwen2 0.5b": (qwen2("0.5b"), 494_032_768),
    "qwen2 7b": (qwen2("7b"), 7_615_616_512),
    "qwen2 72b": (qwen2("72b"), 72_706_203_648),
    "qwen3 0.6b": (qwen3("0.6b"), 596_049_920),
    "qwen3 8b": (qwen3("8b"), 8_190_735_360),
    "qwen3 14b": (qwen3("14b"), 14_768_307_200),
    "qwen3 32b": (qwen3("32b"), 32_762_123_264),
    "mixtral 8x7b": (mixtral("8x7b"), 46_702_792_704),
    "mixtral 8x22b": (mixtral("8x22b"), 140_620_634_112),
    "deepseek v2-lite": (deepseek("v2-lite"), 15_706_484_224),
    # Without biases of the choice, which are state here: one for each expert of 58 layers.
    "deepseek v3": (replace(deepseek("v3"), prediction=None), 671_026_419_200 - 58 * 256),
    "qwen3 30b-a3b": (qwen3_moe("30b-a3b"), 30_532_122_624),
    "qwen3 235b-a22b": (qwen3_moe("235b-a22b"), 235_093_634_560),
    # Without blocks for multi-token prediction and, in Qwen3.5, the vision tower: the text classes of transformers.
    "qwen3-next 80b-a3b": (qwen3_next("80b-a3b"), 79_674_391_296),
    "qwen3.5 4b": (qwen3_5("4b"), 4_205_751_296),
    "qwen3.5 9b": (qwen3_5("9b"), 8_953_803_264),
    "qwen3.5 27b": (qwen3_5("27b"), 26_895_998_464),
    "qwen3.5 35b-a3b": (qwen3_5_moe("35b-a3b"), 34_660_610_688),
    "qwen3.5 397b-a17b": (qwen3_5_moe("397b-a17b"), 396_346_350_336),
    "mamba2 130m": (mamba2("130m"), 128_989_632),
    "mamba2 2.7b": (mamba2("2.7b"), 2_702_599_680),
    "granite 2b": (granite("2b"), 2_533_531_648),
    "granite 8b": (granite("8b"), 8_170_848_256),
    "phi 3-mini": (phi3("3-mini"), 3_821_079_552),
    "phi 3-medium": (phi3("3-medium"), 13_960_238_080),
    "phi 4": (phi3("4"), 14_659_507_200),
    "cohere2 7b": (cohere2("7b"), 8_028_033_024),
    "cohere2 111b": (cohere2("111b"), 111_057_580_032),
    "gemma2 2b": (gemma2("2b"), 2_614_341_888),
    "gemma2 9b": (gemma2("9b"), 9_241_705_984),
    "gemma2 27b": (gemma2("27b"), 27_227_128_320),
    "gemma3 270m": (gemma3("270m"), 268_098_176),
    "gemma3 1b": (gemma3("1b"), 999_885_952),
    # Without the vision tower and the projection of its width to the hidden size, with its norm.
    "gemma3 4b": (gemma3("4b"), 4_300_079_472 - 416_866_032 - 1152 * 2561),
    "gemma3 12b": (gemma3("12b"), 12_187_325_040 - 416_866_032 - 1152 * 3841),
    "gemma3 27b": (gemma3("27b"), 27_432_406_640 - 416_866_032 - 1152 * 5377),
    # Without biases of the choice, and the copies of the embedding and the head in the prediction block.
    "glm 4.5-air": (glm4_moe("4.5-air"), 110_468_824_832 - 46 * 128 - 2 * 151552 * 4096),
    "glm 4.5": (glm4_moe("4.5"), 358_337_791_296 - 90 * 160 - 2 * 151552 * 5120),
    "glm4 9b": (glm4("9b"), 9_400_279_040),
    "glm4 32b": (glm4("32b"), 32_566_081_536),
    "olmoe 1b-7b": (olmoe("1b-7b"), 6_919_161_856),
    "olmo3 7b": (olmo3("7b"), 7_298_011_136),
    "olmo3 32b": (olmo3("32b"), 32_233_522_176),
    "exaone4 1.2b": (exaone4("1.2b"), 1_279_391_488),
    "exaone4 32b": (exaone4("32b"), 32_003_216_384),
    "smollm3 3b": (smollm3("3b"), 3_075_098_624),
    # Of transformers' classes with the released configs: the folders also hold images' towers or biases of the choice.
    "llama4 scout": (llama4("scout"), 107_769_861_120),
    "llama4 maverick": (llama4("maverick"), 400_711_848_960),
    "nemotron3 nano": (nemotron3("nano"), 31_577_937_344),
    "nemotron3 super": (nemotron3("super"), 120_668_687_360),
    "moonlight": (deepseek("moonlight"), 15_960_108_544),
    "kimi k2": (deepseek("kimi-k2"), 1_026_408_209_408),
    "falcon_h1 0.5b": (falcon_h1("0.5b"), 521_411_104),
    "falcon_h1 34b": (falcon_h1("34b"), 33_642_516_224),
    "lfm2 8b-a1b": (lfm2("8b-a1b"), 8_339_929_856),
    "lfm2 350m": (lfm2("350m"), 354_483_968),
    "lfm2 700m": (lfm2("700m"), 742_489_344),
    "lfm2 1.2b": (lfm2("1.2b"), 1_170_340_608),
    "kimi-linear 48b-a3b": (kimi_linear("48b-a3b"), 49_122_675_072),
    "minimax m2": (minimax_m2("230b-a10b"), 228_689_748_992),
    "granite4 h-tiny": (granite4("h-tiny"), 6_939_037_248),
    "granite4 h-small": (granite4("h-small"), 32_207_337_984),
    "minimax text-01": (minimax("text-01"), 456_089_655_296),
    "gpt-oss 20b": (gpt_oss("20b"), 20_914_757_184),
    "gpt-oss 120b": (gpt_oss("120b"), 116_829_156_672),
}
"""Elements in the released weights."""


@pytest.mark.parametrize(("cfg", "published"), PUBLISHED.values(), ids=PUBLISHED)
def test_sizes_equal_those_of_the_released_weights(cfg, published):
    assert cfg.parameter_count().total == published


@pytest.mark.parametrize(
    ("cfg", "published", "table"),
    [
        (mixtral("8x7b"), 12.9, True),
        (mixtral("8x22b"), 39.2, True),
        (qwen3_moe("30b-a3b"), 3.4, True),
        (qwen3_moe("235b-a22b"), 22.2, True),
        (deepseek("v2-lite"), 2.5, False),
        (replace(deepseek("v3"), prediction=None), 36.6, False),
        (gpt_oss("20b"), 3.61, False),
        (gpt_oss("120b"), 5.13, False),
    ],
)
def test_active_weights_per_token_are_as_published(cfg, published, table):
    """In billions. DeepSeek and OpenAI count no embedding table; Qwen and DeepSeek-V2 cut 3.35 and 2.45 to 3.3, 2.4."""
    count = cfg.parameter_count()
    active = count.active - (0 if table else count.embedding)
    assert round(active / 1e9, len(str(published).split(".")[1])) == published


def test_deepseek_v3_predicts_ahead_with_as_many_weights_as_released():
    """README_WEIGHTS.md of the release: 11.5 B, without tables."""
    count, main_count = (cfg.parameter_count() for cfg in (deepseek("v3"), replace(deepseek("v3"), prediction=None)))
    assert (count.total - main_count.total) / 1e9 == pytest.approx(11.5, abs=0.15)


@pytest.mark.parametrize(
    ("cfg", "billions"),
    [
        (mamba2("370m"), 0.37),
        (mamba2("780m"), 0.78),
        (mamba2("1.3b"), 1.3),
        (nemotron_h("8b"), 8.1),
        (nemotron_h("56b"), 56.3),
    ],
)
def test_sizes_of_state_space_models_match_their_names(cfg, billions):
    assert cfg.parameter_count().total / 1e9 == pytest.approx(billions, rel=0.035)


@pytest.mark.parametrize(("size", "layers"), [("8b", (24, 24, 4)), ("56b", (54, 54, 10))])
def test_nemotron_h_has_the_layers_of_the_paper(size, layers):
    """Table 1 (NVIDIA 2025) counts its Mamba-2, MLP and attention layers."""
    pattern = NEMOTRON_H[size].pattern
    assert tuple(map(pattern.count, "M-*")) == layers
    assert pattern.startswith("M-M-M-M*-M-M-M-M-M*-M-") and pattern.endswith("*-M-M-M-M-M-")
    assert nemotron_h(size).stack.layers() == sum(layers)


@pytest.mark.parametrize("size", [size for size in GPT3 if size != "debug"])
def test_gpt3_sizes_match_their_names(size):
    """Never released; the paper's names are rounded. 50m is counted with a vocabulary of bytes."""
    nominal = float(size[:-1]) * {"m": 1e6, "b": 1e9}[size[-1]]
    model = gpt3(size, sequence_length=512, vocabulary_size=257) if size == "50m" else gpt3(size)
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
    assert gpt3("175b").flops().causal * 300e9 == pytest.approx(3.14e23, rel=0.04)


FAMILIES = {"gpt2": (gpt2, GPT2), "gpt3": (gpt3, GPT3), "llama2": (llama2, LLAMA2), "llama3": (llama3, LLAMA3),
            "qwen2": (qwen2, QWEN2), "qwen3": (qwen3, QWEN3), "mixtral": (mixtral, MIXTRAL),
            "deepseek": (deepseek, DEEPSEEK), "qwen3_moe": (qwen3_moe, QWEN3_MOE),
            "qwen3_next": (qwen3_next, QWEN3_NEXT), "qwen3_5": (qwen3_5, QWEN3_5),
            "qwen3_5_moe": (qwen3_5_moe, QWEN3_5_MOE),
            "gpt_oss": (gpt_oss, GPT_OSS), "gemma3": (gemma3, GEMMA3), "granite": (granite, GRANITE),
            "gemma2": (gemma2, GEMMA2), "phi3": (phi3, PHI3), "cohere2": (cohere2, COHERE2),
            "glm4_moe": (glm4_moe, GLM4_MOE), "olmo3": (olmo3, OLMO3), "exaone4": (exaone4, EXAONE4),
            "smollm3": (smollm3, SMOLLM3), "mamba2": (mamba2, MAMBA2),
            "nemotron_h": (nemotron_h, NEMOTRON_H), "nemotron3": (nemotron3, NEMOTRON_3),
            "llama4": (llama4, LLAMA4), "lfm2": (lfm2, LFM2), "minimax": (minimax, MINIMAX),
            "falcon_h1": (falcon_h1, FALCON_H1),
            "kimi_linear": (kimi_linear, KIMI_LINEAR), "glm4": (glm4, GLM4), "olmoe": (olmoe, OLMOE),
            "minimax_m2": (minimax_m2, MINIMAX_M2), "granite4": (granite4, GRANITE4)}  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_every_preset_is_consistent(name):
    family, sizes = FAMILIES[name]
    for size in sizes:
        assert not problems_of(family(size)), size
    with pytest.raises(UserError, match=r"no size '9z'; sizes: debug, "):
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
