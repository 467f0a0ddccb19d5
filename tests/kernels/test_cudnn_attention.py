"""cuDNN attention without a GPU: the programs it lowers to, what recomputation keeps of it, and what is refused.

Where a program must run, a stand-in that saves the same residuals in plain jax takes the kernel's place.
"""

import json
import os
import re
import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from megajax.kernels.attention import Mask, cudnn_attention, cudnn_limits, cudnn_refusal, reference_attention
from megajax.kernels.cudnn import OUTPUT, STATISTICS
from megajax.layers.config import AttentionConfig, BlockConfig, GatedMLPConfig, StackConfig
from megajax.layers.context import Context
from megajax.layers.kept import Recomputing
from megajax.layers.param import Site, bind, specs
from megajax.mesh.config import ParallelConfig
from megajax.mesh.layout import Layout
from megajax.mesh.rules import Plan

ROWS, LENGTH, HEADS, GROUPS, SIZE, LAYERS = 2, 16, 4, 2, 8, 3
SCALE = SIZE**-0.5
QUERIES, KEYS = (ROWS, LENGTH, HEADS, SIZE), (ROWS, LENGTH, GROUPS, SIZE)
INDEX = np.arange(LENGTH)
SEGMENTS = np.repeat([[0, 1], [2, 3]], [5, LENGTH - 5], axis=1).astype(np.int32)
POLICIES = {
    "selective": jax.checkpoint_policies.save_only_these_names("query", "key", "value", OUTPUT, STATISTICS),
    "full": jax.checkpoint_policies.nothing_saveable,
}
MASKS = pytest.mark.parametrize("segments", [None, SEGMENTS], ids=["whole_rows", "documents"])
EXPECTED = {"none": (1, 1), "selective": (1, 1), "full": (2, 1)}
"""Forward and backward kernels of a layer's gradient."""
RECOMPUTE = pytest.mark.parametrize("recompute", ["none", "selective", "full"])

try:
    GPU = any(device.platform == "gpu" for device in jax.devices())
except RuntimeError:
    GPU = False


def whole_row(segments: np.ndarray | None) -> Mask:
    return Mask(INDEX, INDEX, segments, segments)


@pytest.fixture
def cudnn_taken_as_present(monkeypatch):
    """Lets programs be traced and lowered where cuDNN isn't installed."""
    monkeypatch.setattr("jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version", lambda: 91000)


def tower(attend, recompute: str, mesh: Mesh, x: jax.Array) -> jax.Array:
    """LAYERS layers that are little but attention, scanned and in an island, as the model has it: [B, S, N, H]."""
    island = jax.shard_map(attend, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False)

    def layer(x: jax.Array) -> jax.Array:
        few = x[:, :, : HEADS // GROUPS]
        q, k, v = checkpoint_name(jnp.sin(x), "query"), checkpoint_name(2 * few, "key"), checkpoint_name(few, "value")
        return x + jnp.sin(island(q, k, v))

    if recompute != "none":
        layer = jax.checkpoint(layer, policy=POLICIES[recompute], prevent_cse=False)
    return jax.lax.scan(lambda x, _: (layer(x), None), x, None, length=LAYERS)[0]


def lowered(f, *args) -> str:
    return jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def kernels(text: str) -> tuple[int, int]:
    """Forward and backward kernels in a program's text; those in a loop count once."""
    calls = re.findall(r"__cudnn\$fmha(\w+)[(\"]", text)
    backward = sum(call.endswith("Backward") for call in calls)
    return len(calls) - backward, backward


def kept(f, *args) -> list[tuple[tuple[int, ...], jnp.dtype]]:
    """What the first scan of f stacks up for later."""
    jaxpr = jax.make_jaxpr(f)(*args)
    forward = next(eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan")
    return [(var.aval.shape, var.aval.dtype) for var in forward.outvars]


def summed(f):
    return lambda *args: jnp.sum(f(*args).astype(jnp.float32))


@RECOMPUTE
def test_the_forward_kernel_runs_again_only_where_nothing_is_kept(recompute, cudnn_taken_as_present):
    attend = partial(cudnn_attention, mask=whole_row(None), scale=SCALE)
    gradient = jax.grad(summed(partial(tower, attend, recompute, Mesh(np.array(jax.devices()[:2]), ("data",)))))
    x = jax.ShapeDtypeStruct(QUERIES, jnp.bfloat16)
    assert kernels(lowered(gradient, x)) == EXPECTED[recompute]
    statistics = ((LAYERS, ROWS, HEADS, LENGTH), jnp.float32)
    assert kept(gradient, x).count(statistics) == (0 if recompute == "full" else 1)


@RECOMPUTE
@MASKS
def test_a_stack_keeps_what_the_backward_kernel_needs_once(segments, recompute, cudnn_taken_as_present):
    hidden = HEADS * SIZE
    site = Site(layout=Layout(Plan.of(ParallelConfig())), hidden=hidden, std=0.3, output_std=0.3)
    block = BlockConfig(mixer=AttentionConfig(heads=HEADS, kv_heads=GROUPS, kernel="cudnn"), mlp=GatedMLPConfig(ffn=24))
    cfg = StackConfig(pattern=(block,), repeats=LAYERS)
    stack = nnx.eval_shape(lambda: cfg.build(site, recomputing=Recomputing(recompute=recompute)))
    ctx = Context(jnp.asarray(INDEX)[None].repeat(ROWS, 0), jnp.asarray(INDEX), segments)
    weights = {path: jax.ShapeDtypeStruct(spec.shape, jnp.bfloat16) for path, spec in specs(stack).items()}
    gradient = jax.grad(summed(lambda values, x: bind(stack, values)(x, ctx)))
    args = weights, jax.ShapeDtypeStruct((ROWS, LENGTH, hidden), jnp.bfloat16)
    assert kernels(lowered(gradient, *args)) == EXPECTED[recompute]
    stacked = kept(gradient, *args)
    # As large as the output are the queries too.
    assert stacked.count(((LAYERS, *QUERIES), jnp.bfloat16)) == (0 if recompute == "full" else 2)
    assert stacked.count(((LAYERS, ROWS, HEADS, LENGTH), jnp.float32)) == (0 if recompute == "full" else 1)


@MASKS
def test_the_program_is_that_of_jax_gradient_to_the_letter(segments, cudnn_taken_as_present):
    """Same kernels, same settings, same operands: names change what is kept, never what is computed."""

    def ours(q, k, v, segments):
        return jnp.sin(cudnn_attention(q, k, v, whole_row(segments), scale=SCALE))

    def plain(q, k, v, segments):
        mask = None if segments is None else whole_row(segments).visible()[:, None]
        return jnp.sin(
            jax.nn.dot_product_attention(q, k, v, mask=mask, scale=SCALE, is_causal=True, implementation="cudnn")
        )

    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in (QUERIES, KEYS, KEYS)]
    found, expected = (lowered(jax.value_and_grad(summed(f), (0, 1, 2)), *shapes, segments) for f in (ours, plain))
    assert kernels(found) == (1, 1)
    assert found == expected
    settings = re.search(r"fmha\w*Softmax\(.*?backend_config = \"(.*?)\"", found)[1]
    assert "CAUSAL" in settings and re.search(rf"fmha_scale.{{1,6}} {SCALE:.6g}", settings)


def test_a_window_is_the_kernels_own_and_goes_into_the_mask_of_documents(cudnn_taken_as_present):
    """The kernel counts the query's own place: a window of 5 is a length of 6. jax's plain path agrees."""
    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in (QUERIES, KEYS, KEYS)]

    def attend(segments):
        mask = whole_row(segments)._replace(window=5)
        text = lowered(jax.value_and_grad(summed(partial(cudnn_attention, mask=mask, scale=SCALE)), (0, 1, 2)), *shapes)
        assert kernels(text) == (1, 1)
        return set(re.findall(r"sliding_window_length\S* (\d+)", text)), "ScaleBias" in text

    assert attend(None) == ({"6"}, False)
    assert attend(SEGMENTS) == ({"0"}, True)
    rng = np.random.default_rng(3)
    q, k, v = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in (QUERIES, KEYS, KEYS))
    with jax.default_matmul_precision("highest"):
        plain = jax.nn.dot_product_attention(q, k, v, scale=SCALE, is_causal=True, local_window_size=(5, 0))
        found = reference_attention(q, k, v, whole_row(None)._replace(window=5), scale=SCALE)
    np.testing.assert_allclose(found, plain, atol=1e-5)


def test_values_narrower_than_keys_go_in_with_zeros_and_come_out_without(monkeypatch):
    monkeypatch.setattr(jax.nn, "dot_product_attention", stand_in([]))
    rng = np.random.default_rng(3)
    q, k, v = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in (QUERIES, KEYS, (*KEYS[:3], SIZE - 3)))
    with jax.default_matmul_precision("highest"):
        found, expected = (
            jax.value_and_grad(lambda v, f=f: jnp.sum(jnp.sin(f(q, k, v, whole_row(None), scale=SCALE))))(v)
            for f in (cudnn_attention, reference_attention)
        )
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def stand_in(calls: list[str]):
    """Attention in plain jax with the signature of jax's, and with the rule and the residuals of its cuDNN path."""

    def weights(q, k, mask):
        scores = jnp.einsum("bskgh,btkh->bkgst", q.reshape(*k.shape[:3], -1, SIZE), k) * SCALE
        seen = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))[None, None]
        return jnp.where((seen if mask is None else seen & mask)[:, :, None], scores, -1e30)

    def forward(q, k, v, mask):
        calls.append("forward")
        scores = weights(q, k, mask)
        statistics = jax.nn.logsumexp(scores, axis=-1)
        out = jnp.einsum("bkgst,btkh->bskgh", jnp.exp(scores - statistics[..., None]), v).reshape(q.shape)
        return out, (q, k, v, mask, statistics.reshape(len(q), HEADS, LENGTH), out)

    def backward(saved, dout):
        """From the statistics and the output, without a second softmax (Dao 2023, algorithm 2)."""
        calls.append("backward")
        q, k, v, mask, statistics, out = saved
        split = (*k.shape[:3], -1, SIZE)
        p = jnp.exp(weights(q, k, mask) - statistics.reshape(len(q), GROUPS, -1, LENGTH)[..., None])
        delta = jnp.sum(out * dout, -1).reshape(split[:-1]).transpose(0, 2, 3, 1)[..., None]
        dout = dout.reshape(split)
        ds = p * (jnp.einsum("bskgh,btkh->bkgst", dout, v) - delta) * SCALE
        dq = jnp.einsum("bkgst,btkh->bskgh", ds, k).reshape(q.shape)
        dk = jnp.einsum("bkgst,bskgh->btkh", ds, q.reshape(split))
        return dq, dk, jnp.einsum("bkgst,bskgh->btkh", p, dout), None

    fused = jax.custom_vjp(lambda *args: forward(*args)[0])
    fused.defvjp(forward, backward)

    def attention(q, k, v, *, mask, scale, is_causal, local_window_size, implementation):
        assert (scale, is_causal, local_window_size, implementation) == (SCALE, True, None, "cudnn")
        return fused(q, k, v, mask)

    return attention


def gradients(attend, recompute: str, segments: np.ndarray | None, jit: bool, dtype=jnp.float32) -> list[jax.Array]:
    """Sum of squares of a layer of attention, and its gradients at queries, keys and values."""

    def total(q, k, v):
        def layer(q, k, v):
            named = checkpoint_name(q, "query"), checkpoint_name(k, "key"), checkpoint_name(v, "value")
            return jnp.sin(attend(*named, whole_row(segments), scale=SCALE))

        if recompute != "none":
            layer = jax.checkpoint(layer, policy=POLICIES[recompute])
        return jnp.sum(layer(q, k, v).astype(jnp.float32) ** 2)

    rng = np.random.default_rng(3)
    values = [jnp.asarray(rng.normal(size=shape), dtype) for shape in (QUERIES, KEYS, KEYS)]
    gradient = jax.value_and_grad(total, (0, 1, 2))
    return jax.tree.leaves((jax.jit(gradient) if jit else gradient)(*values))


@pytest.mark.parametrize(("recompute", "jit"), [("selective", True), ("full", True), ("selective", False)])
@MASKS
def test_gradients_through_the_kept_residuals_are_those_of_the_reference(segments, recompute, jit, monkeypatch):
    calls = []
    monkeypatch.setattr(jax.nn, "dot_product_attention", stand_in(calls))
    with jax.default_matmul_precision("highest"):
        found = gradients(cudnn_attention, recompute, segments, jit)
        expected = gradients(reference_attention, recompute, segments, True)
    assert {"forward", "backward"} <= set(calls)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5 * np.abs(other).max())


def test_a_jax_that_saves_other_residuals_is_named(monkeypatch):
    """Losing the name would only show as a slower step, so it is an error."""
    theirs = jax.nn.dot_product_attention
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda *args, implementation, **kw: theirs(*args, **kw))
    q, k, v = (jnp.ones(shape, jnp.bfloat16) for shape in (QUERIES, KEYS, KEYS))
    with pytest.raises(RuntimeError, match=rf"jax {jax.__version__} saves other residuals .*float32\[2, 4, 16\]"):
        jax.grad(lambda q: jnp.sum(cudnn_attention(q, k, v, whole_row(None), scale=SCALE)))(q)


FITTING = {"dtype": "bfloat16", "head_dim": 128, "length": 4096, "dropout": 0.0}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({}, None),
        ({"dtype": jnp.float16, "head_dim": 8, "length": 2}, None),
        ({"dtype": "float32"}, "not in float32"),
        ({"head_dim": 136}, "not of 136"),
        ({"head_dim": 100}, "not of 100"),
        ({"length": 4095}, "not of 4095"),
        ({"dropout": 0.1}, "which is 0.1"),
    ],
)
def test_limits_are_known_without_a_gpu(change, says):
    found = cudnn_limits(**FITTING | change)
    assert found is None if says is None else says in found


@pytest.mark.skipif(GPU, reason="there is a GPU here")
def test_the_device_is_refused_first():
    for change in ({}, {"dtype": "float32"}):
        assert cudnn_refusal(**FITTING | change) == "needs an NVIDIA GPU, jax found cpu"


H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: 84978434048
  cuda_compute_capability { major: 9 minor: 0 }
}
platform_name: "CUDA" device_description_str: "NVIDIA H100 80GB HBM3"
dnn_version_info { major: 9 minor: 8 patch: 0 } runtime_version { major: 12 minor: 9 patch: 0 }
"""


def compile_for_absent_gpus() -> None:
    """Prints, for each way of recomputing, kernels and temporary bytes; runs in a process of its own."""
    topology = topologies.get_topology_desc(
        topology_name="absent", platform="cuda", target_config=H100, topology="1x1x2"
    )
    mesh = Mesh(np.array(topology.devices), ("data",))
    x = jax.ShapeDtypeStruct((2, 512, HEADS, 64), jnp.bfloat16, sharding=NamedSharding(mesh, P("data")))
    index = np.arange(512)

    def theirs(q, k, v):
        out = jax.nn.dot_product_attention(q, k, v, scale=SCALE, is_causal=True, implementation="cudnn")
        return checkpoint_name(out, OUTPUT)

    ours = partial(cudnn_attention, mask=Mask(index, index, None, None), scale=SCALE)
    found = {}
    for name, attend, recompute in [("jax", theirs, "selective"), *[(each, ours, each) for each in EXPECTED]]:
        compiled = jax.jit(jax.grad(summed(partial(tower, attend, recompute, mesh)))).lower(x).compile()
        found[name] = [*kernels(compiled.as_text()), compiled.memory_analysis().temp_size_in_bytes]
    print(json.dumps(found))


@pytest.mark.skipif(
    not all(find_spec(name) for name in ("jax_cuda12_plugin", "nvidia")) or find_spec("nvidia.cudnn") is None,
    reason="compiling for absent GPUs needs jax[cuda12]: the CUDA plugin and cuDNN",
)
def test_compiled_for_absent_gpus_it_keeps_no_more_than_the_statistics():
    settings = {
        "JAX_PLATFORMS": "cpu",
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        # Trying kernels out needs the GPU that isn't there.
        "XLA_FLAGS": "--xla_gpu_autotune_level=0",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
    }
    program = "from test_cudnn_attention import compile_for_absent_gpus as run; run()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=os.environ | settings)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert {name: tuple(found[name][:2]) for name in EXPECTED} == EXPECTED
    assert found["jax"][:2] == [2, 1], "jax names its residuals now: fused_attention is needed no more"
    statistics = LAYERS * HEADS * 512 * 4
    # Alignment adds a few hundred bytes for each of the loops' buffers; the output, kept twice, would be 786,432.
    assert found["selective"][2] <= found["jax"][2] + statistics + 4096


@pytest.mark.skipif(not GPU, reason="needs an NVIDIA GPU")
@RECOMPUTE
@MASKS
def test_on_a_gpu_it_agrees_with_the_reference(segments, recompute):
    found = gradients(cudnn_attention, recompute, segments, True, jnp.bfloat16)
    expected = gradients(reference_attention, recompute, segments, True, jnp.float32)
    for one, other in zip(found, expected, strict=True):
        # bfloat16 keeps 8 bits; the longest way from inputs to a gradient rounds a few times.
        np.testing.assert_allclose(np.asarray(one, np.float32), other, atol=2**-6 * np.abs(other).max())
