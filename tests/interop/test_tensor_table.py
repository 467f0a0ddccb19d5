"""Tables of names: every piece of our weights in its tensor, in both directions; boxes read like whole weights."""

import re

import jax.numpy as jnp
import numpy as np
import pytest
from einops import rearrange
from hugging_face_folders import Arrays, read_weight

from megajax.config.errors import UserError
from megajax.interop.weights import name_mapping
from megajax.interop.weights.foreign import ForeignWeights, declared_by, demand_fit
from megajax.interop.weights.name_mapping import MappedTensor, Row, resolved
from megajax.layers.attention.config import AttentionConfig
from megajax.layers.block.config import BlockConfig
from megajax.layers.mlp.config import GatedMLPConfig
from megajax.layers.moe.config import MoEConfig
from megajax.layers.norm.config import RMSNormConfig
from megajax.layers.stack.config import StackConfig
from megajax.models.decoder.config import DecoderConfig

LAYER = "layers.{layer}"
ENDS = [Row("table", "tokens", index=(slice(0, 10),)), Row("norm", "norm.gain"), Row("head", "head")]
NORMS = [Row(f"{LAYER}.norm_1", "stack.*.mixer_norm.gain"), Row(f"{LAYER}.norm_2", "stack.*.mlp_norm.gain")]
FUSED = Row(
    f"{LAYER}.qkv",
    ("stack.*.mixer.query", "stack.*.mixer.key", "stack.*.mixer.value"),
    split="(g r h) d -> g r h d",
    axis=1,
    sizes={"g": 2, "h": 4},
    pattern="g r h d -> d (g r) h",
)
REST = [Row(f"{LAYER}.output", "stack.*.mixer.output", "d (n h) -> n h d")]
EXPERTS = [
    Row(f"{LAYER}.router", "stack.*.mlp.router", "e d -> d e"),
    *[
        Row(f"{LAYER}.experts.{{expert}}.{name}", f"stack.*.mlp.experts.{name}", "o i -> i o")
        for name in ("up", "gate", "down")
    ],
]
TABLE = [*ENDS, *NORMS, FUSED, *REST, *EXPERTS]


@pytest.fixture(scope="module")
def model() -> DecoderConfig:
    mixer = AttentionConfig(heads=4, kv_heads=2, head_dim=4)
    mlp = MoEConfig(experts=3, top_k=1, expert=GatedMLPConfig(ffn=5))
    block = BlockConfig(mixer=mixer, mlp=mlp, norm=RMSNormConfig())
    stack = StackConfig(pattern=(block,), repeats=2)
    return DecoderConfig(hidden=6, vocabulary_size=10, sequence_length=8, stack=stack)


@pytest.fixture(scope="module")
def table(model: DecoderConfig) -> list[MappedTensor]:
    return resolved(TABLE, declared_by(model))


@pytest.fixture(scope="module")
def tensors(table: list[MappedTensor]) -> Arrays:
    draw = np.random.default_rng(0)
    return Arrays({tensor.name: draw.normal(size=tensor.shape()).astype(np.float32) for tensor in table})


def test_parts_of_a_fused_tensor_are_in_their_places(model, table, tensors) -> None:
    """Query heads 2g and 2g+1 of group g come before its key and its value."""
    weights = ForeignWeights(tensors, table, declared_by(model))
    query, key, value = (read_weight(weights, f"stack.blocks.0.mixer.{name}") for name in ("query", "key", "value"))
    fused = tensors.arrays["layers.1.qkv"].reshape(2, 4, 4, 6)
    for group in range(2):
        for head in range(2):
            np.testing.assert_array_equal(query[1, :, 2 * group + head], fused[group, head].T)
        np.testing.assert_array_equal(key[1, :, group], fused[group, 2].T)
        np.testing.assert_array_equal(value[1, :, group], fused[group, 3].T)


def test_boxes_are_parts_of_whole_weights(model, table, tensors) -> None:
    weights, draw = ForeignWeights(tensors, table, declared_by(model)), np.random.default_rng(1)
    for path, shape in weights.shapes.items():
        for _ in range(5):
            bounds = [sorted(draw.choice(size + 1, 2, replace=False)) for size in shape]
            box = tuple(slice(int(start), int(stop)) for start, stop in bounds)
            np.testing.assert_array_equal(weights.read(path, box), read_weight(weights, path)[box])


def test_layers_of_several_dtypes_lose_no_digits(model, table, tensors) -> None:
    """Layer 0 in bfloat16 and layer 1 in float32, as of a partly quantized checkpoint."""
    arrays = dict(tensors.arrays)
    arrays["layers.0.norm_1"] = arrays["layers.0.norm_1"].astype(jnp.bfloat16)
    gains = read_weight(ForeignWeights(Arrays(arrays), table, declared_by(model)), "stack.blocks.0.mixer_norm.gain")
    for layer in range(2):
        np.testing.assert_array_equal(gains[layer], arrays[f"layers.{layer}.norm_1"].astype(np.float32))


def test_rows_past_the_vocabulary_are_zeros(model, table, tensors) -> None:
    weights = ForeignWeights(tensors, table, declared_by(model))
    np.testing.assert_array_equal(read_weight(weights, "tokens")[:10], tensors.arrays["table"])
    assert read_weight(weights, "tokens").shape == (128, 6) and not read_weight(weights, "tokens")[10:].any()


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([row for row in TABLE if row not in REST], "no row of the table holds stack.blocks.0.mixer.output"),
        ([*TABLE, Row("again", "norm.gain")], r"two rows for norm.gain\(\)"),
    ],
)
def test_a_table_holds_each_weight_once(model, rows, message) -> None:
    with pytest.raises(ValueError, match=message):
        resolved(rows, declared_by(model))


def test_all_differences_are_reported_together(table, tensors) -> None:
    arrays = dict(tensors.arrays)
    arrays["layers.0.outptu"] = arrays.pop("layers.0.output")
    arrays["norm"] = np.zeros(7)
    with pytest.raises(UserError) as error:
        demand_fit(Arrays({**arrays, "rotary.angles": np.zeros(3)}), table, ignored=("rotary.*",))
    text = str(error.value)
    assert "layers.0.output: missing; did you mean layers.0.outptu?" in text
    assert "norm: shape [7], but [6] by the model's config" in text
    assert "layers.0.outptu: the model has no such weight" in text and "rotary" not in text


PATTERNS = [
    *("o i -> i o", "(n h) d -> d n h", "g n h d -> d (g n) h", "(g r h) d -> g r h d", "g (r v) d -> d (g r) v"),
    *("(n h) 1 k -> k n h", "d c y x -> (y x c) d", "1 1 n 1 -> n", "d -> 1 d", "e d (f two) -> e d f two"),
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_mean_what_they_mean_in_einops(pattern: str) -> None:
    sizes = dict(zip("dnhgrvkoicyxef", (2, 3, 4, 2, 5, 3, 2, 4, 6, 3, 2, 3, 2, 3), strict=True)) | {"two": 2}
    groups = re.findall(r"\([^)]*\)|[a-z_]+|1", pattern.partition("->")[0])
    shape = [int(np.prod([sizes[name] for name in re.findall("[a-z]+", group)])) for group in groups]
    array = np.arange(np.prod(shape)).reshape(shape)
    used = {name: size for name, size in sizes.items() if re.search(rf"\b{name}\b", pattern.partition("->")[0])}
    np.testing.assert_array_equal(name_mapping._rearranged(array, pattern, sizes), rearrange(array, pattern, **used))
