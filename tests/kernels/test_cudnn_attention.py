"""cuDNN attention without a GPU: its calls, compared with jax's own, and what recomputation saves of it."""

import json
import re
from functools import partial

import jax
import jax._src.cudnn.fused_attention_stablehlo as theirs
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from megajax.kernels.attention.attention import Mask, attend
from megajax.kernels.attention.cudnn import Documents
from megajax.layers.attention.config import AttentionConfig
from megajax.layers.block.config import BlockConfig
from megajax.layers.context import Context
from megajax.layers.mlp.config import GatedMLPConfig
from megajax.layers.param import LayerSettings, bind, specs
from megajax.layers.recompute import Recomputing
from megajax.layers.stack.config import StackConfig
from megajax.mesh.config import ParallelConfig
from megajax.mesh.layout import Layout
from megajax.mesh.sharding_rules import Plan

ROWS, LENGTH, HEADS, GROUPS, SIZE, LAYERS = 2, 16, 4, 2, 8, 3
SCALE = SIZE**-0.5
QUERIES, KEYS = (ROWS, LENGTH, HEADS, SIZE), (ROWS, LENGTH, GROUPS, SIZE)
INDEX = np.arange(LENGTH)
SEGMENTS = np.repeat([[0, 1], [2, 3]], [5, LENGTH - 5], axis=1).astype(np.int32)
MASKS = pytest.mark.parametrize("segments", [None, SEGMENTS], ids=["whole_rows", "documents"])
EXPECTED = {"none": (1, 1), "selective": (1, 1), "full": (2, 1)}
"""Forward and backward kernels of a layer's gradient."""
RECOMPUTE = pytest.mark.parametrize("recompute", ["none", "selective", "full"])


def whole_row(segments: np.ndarray | None) -> Mask:
    return Mask(INDEX, INDEX, segments, segments)


def lowered(f, *args) -> str:
    return jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def kernels(text: str) -> tuple[int, int]:
    """Forward and backward kernels in a program's text; those in a loop count once."""
    calls = re.findall(r"__cudnn\$fmha(\w+)[(\"]", text)
    backward = sum(call.endswith("Backward") for call in calls)
    return len(calls) - backward, backward


def scan_outputs(f, *args) -> list[tuple[tuple[int, ...], jnp.dtype]]:
    """Shapes and dtypes of the outputs of f's first scan."""
    jaxpr = jax.make_jaxpr(f)(*args)
    forward = next(eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan")
    return [(var.aval.shape, var.aval.dtype) for var in forward.outvars]


def summed(f):
    return lambda *args: jnp.sum(f(*args).astype(jnp.float32))


@RECOMPUTE
@MASKS
def test_a_stack_saves_the_residuals_of_the_backward_kernel_once(segments, recompute):
    hidden = HEADS * SIZE
    settings = LayerSettings(layout=Layout(Plan.of(ParallelConfig())), hidden=hidden, std=0.3, output_std=0.3)
    # Isolated documents bring a kernel for rows with too many of them, which needs a GPU to be lowered for.
    kernel = "cudnn" if segments is None else "cudnn_mask"
    block = BlockConfig(mixer=AttentionConfig(heads=HEADS, kv_heads=GROUPS, kernel=kernel), mlp=GatedMLPConfig(ffn=24))
    cfg = StackConfig(pattern=(block,), repeats=LAYERS)
    stack = nnx.eval_shape(lambda: cfg.build(settings, recomputing=Recomputing(recompute=recompute)))
    ctx = Context(jnp.asarray(INDEX)[None].repeat(ROWS, 0), jnp.asarray(INDEX), segments)
    weights = {path: jax.ShapeDtypeStruct(spec.shape, jnp.bfloat16) for path, spec in specs(stack).items()}
    gradient = jax.grad(summed(lambda values, x: bind(stack, values)(x, ctx)))
    args = weights, jax.ShapeDtypeStruct((ROWS, LENGTH, hidden), jnp.bfloat16)
    assert kernels(lowered(gradient, *args)) == EXPECTED[recompute]
    stacked = scan_outputs(gradient, *args)
    # The queries are as large as the output.
    assert stacked.count(((LAYERS, *QUERIES), jnp.bfloat16)) == (0 if recompute == "full" else 2)
    assert stacked.count(((LAYERS, ROWS, HEADS, LENGTH), jnp.float32)) == (0 if recompute == "full" else 1)


def calls(text: str) -> list[tuple]:
    """cuDNN's calls in a program's text: target, number of operands, configuration, layouts and types."""
    actual = []
    for line in text.splitlines():
        if match := re.search(r"custom_call @(__cudnn\$fmha\w+)\((.*?)\) \{.*backend_config = \"(.*?)\"(.*)$", line):
            target, operands, config, rest = match.groups()
            config = json.loads(config.replace(r"\22", '"'))
            # The origin of the calls: jax may have them in functions of their own, and with metadata.
            actual.append((target, operands.count("%"), config, re.sub(r"[\w.]+ = \{.*?\},? ?|loc\(.*\)", "", rest)))
    return actual


MIXED = [(2, 32, 4, 48), (2, 32, 2, 48), (2, 32, 2, 32)]
ALIKE = [(2, 32, 4, 16), (2, 32, 2, 16), (2, 32, 2, 16)]
ACROSS = [(2, 32, 4, 16), (2, 48, 2, 16), (2, 48, 2, 16)]
LENGTHS = np.array([[5, 20, 7, -1], [32, -1, -1, -1]], np.int32)
BEGINS = np.array([[0, 5, 25, -1, -1], [0, -1, -1, -1, -1]], np.int32)
FOUR = np.array([np.repeat([0, 1, 2], [5, 20, 7]), np.zeros(32)], np.int32)
PACKED = {"q_seqlen": LENGTHS, "kv_seqlen": LENGTHS, "q_offsets": BEGINS, "kv_offsets": BEGINS}
CAUSAL, PADDED = theirs.MaskType.CAUSAL, theirs.MaskType.PADDING_CAUSAL
CALLS = {
    "causal": ("cudnn", ALIKE, {}, {"mask_type": CAUSAL}),
    "both ways": ("cudnn", ALIKE, {"causal": False}, {}),
    "a window": ("cudnn", ALIKE, {"window": 5}, {"mask_type": CAUSAL, "sliding_window_length": 6}),
    "documents": ("cudnn", ALIKE, {"documents": 4}, {"mask_type": PADDED, **PACKED}),
    "documents and a window": (
        *("cudnn", ALIKE, {"documents": 4, "window": 5}),
        {"mask_type": PADDED, "sliding_window_length": 6, **PACKED},
    ),
    "values of another size": ("cudnn", [(*x[:3], x[3] * 4) for x in MIXED], {}, {"mask_type": CAUSAL}),
    "documents in a mask": ("cudnn_mask", ALIKE, {"documents": 4}, {"mask_type": CAUSAL, "mask": True}),
    "across": ("cudnn", ACROSS, {"causal": False}, {}),
    "padded": (
        *("cudnn", ALIKE, {"causal": False, "padded": [20, 0]}),
        {"mask_type": theirs.MaskType.PADDING, "q_seqlen": [32, 1], "kv_seqlen": [20, 1]},
    ),
    "padded, causal": (
        *("cudnn_mask", ALIKE, {"padded": [20, 32]}),
        {"mask_type": PADDED, "q_seqlen": [32, 32], "kv_seqlen": [20, 32]},
    ),
    "across, padded": (
        *("cudnn", ACROSS, {"causal": False, "padded": [32, 20], "key_padded": [48, 3]}),
        {"mask_type": theirs.MaskType.PADDING, "q_seqlen": [32, 32], "kv_seqlen": [48, 3]},
    ),
}


@pytest.mark.parametrize(("case", "dtype"), [*((case, jnp.bfloat16) for case in CALLS), ("documents", jnp.float16)])
def test_the_custom_calls_equal_those_of_jax(case, dtype, monkeypatch):
    """Kernels, settings and operands are the same, which finds a jax that calls cuDNN in another way."""
    monkeypatch.setattr(theirs, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(theirs, "check_compute_capability", lambda _: True)
    monkeypatch.setattr("megajax.kernels.attention.cudnn.DOCUMENTS", 4)
    # Where documents or padding don't fit, another kernel is called, which is not lowered here.
    monkeypatch.setattr(jax.lax, "cond", lambda fit, fused, fallback: fused())
    kernel, shapes, options, expected_config = CALLS[case]
    options, expected_config = dict(options), dict(expected_config)
    lengths = [32, shapes[1][1]]
    segments = [FOUR] * 2 if options.pop("documents", None) else [None] * 2
    if texts := options.pop("padded", None):
        texts_of = zip(lengths, (texts, options.pop("key_padded", texts)), strict=True)
        segments = [(np.arange(n) < np.array(text_lengths)[:, None]).astype(np.int32) for n, text_lengths in texts_of]
        options["padded"] = True
    mask = Mask(*map(np.arange, lengths), *segments, **options)
    if expected_config.pop("mask", False):
        expected_config["mask"] = mask.visible()[:, None]
    for name in {"q_seqlen", "kv_seqlen"} & expected_config.keys():
        expected_config[name] = np.array(expected_config[name], np.int32)
    arrays = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    jaxs = partial(theirs.dot_product_attention, scale=SCALE, **expected_config)
    actual, expected = (
        calls(lowered(jax.value_and_grad(summed(f), (0, 1, 2)), *arrays))
        for f in (partial(attend, kernel, mask=mask, scale=SCALE), jaxs)
    )
    assert len(actual) == 2
    assert actual == expected


def test_document_operands_equal_those_of_jax():
    rng = np.random.default_rng(0)
    q, k = np.zeros((3, 40, 4, 16)), np.zeros((3, 40, 2, 16))
    segments = np.sort(rng.integers(0, 5, (3, 40)), axis=1).astype(np.int32)
    lengths, starts = np.full((3, 8), -1, np.int32), np.full((3, 9), -1, np.int32)
    for row, row_segments in enumerate(segments):
        _, first, count = np.unique(row_segments, return_index=True, return_counts=True)
        lengths[row, : len(count)], starts[row, : len(first)] = count, first
    actual = Documents.of(jnp.asarray(segments), 8)
    expected = theirs._fix_seqlen_offsets(lengths, lengths, starts, starts, q, k)
    for value, reference in zip(actual.operands(q, k), expected, strict=True):
        np.testing.assert_array_equal(value, reference)
    assert actual.fit and not Documents.of(jnp.asarray(segments), 3).fit
    np.testing.assert_array_equal(np.asarray(starts)[np.arange(3)[:, None], segments - segments[:, :1]] >= 0, True)
