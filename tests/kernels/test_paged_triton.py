"""The Triton kernels of a paged cache: interpreted against the reference, and compiled for virtual GPUs."""

import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from megajax.config import load
from megajax.config.errors import UserError
from megajax.inference.assembly import choose_kernel
from megajax.kernels.attention.capability import Device
from megajax.kernels.paged.attention import KERNELS, reference
from megajax.kernels.paged.capability import PAGED_BACKENDS, PagedRequest, choose_paged
from megajax.kernels.paged.pools import Pools
from megajax.kernels.paged.triton import paged_attention
from megajax.mesh.xla import DEVICELESS, GPU, compiler_options
from megajax.planning import virtual_devices as devices
from megajax.planning.virtual_devices import GPUS, Cluster

BLOCK, TABLE = 16, 36
"""A table of 576 positions: three splits."""


def step(width: int, heads: int, groups: int, size: int, *, latent: int | None = None, stored: str = "float32"):
    """Queries of five rows and their cache. Row 0 is full, row 1 begins, row 2 is half a step, row 4 is empty."""
    draw = np.random.default_rng(width + heads + size)
    rows, blocks = 5, 5 * TABLE + 3

    def pool(*rest: int) -> jax.Array:
        return jnp.asarray(draw.standard_normal((blocks, BLOCK, groups, *rest)), "float32")

    q = jnp.asarray(draw.standard_normal((rows, width, heads, size)), "float32")
    keys, values = pool(size), None if latent else pool(size)
    scales = (None, None)
    if stored != "float32":
        keys, values = ((10 * x).astype(stored) for x in (keys, values))
        scales = jnp.abs(pool()) / 10, jnp.abs(pool()) / 10
    table = draw.permutation(blocks)[: rows * TABLE].reshape(rows, TABLE)
    first = np.array([TABLE * BLOCK - width, 0, 300, 255, 0])
    positions = first[:, None] + np.arange(width)
    positions[2, (width + 1) // 2 :] = positions[4] = -1
    pools = Pools(keys, values, latent or size, *scales)
    return q, pools, jnp.asarray(table, jnp.int32), jnp.asarray(positions, jnp.int32)


CASES = {
    "one query a row": {"width": 1, "heads": 4, "groups": 2, "size": 16},
    "prompts": {"width": 40, "heads": 2, "groups": 1, "size": 16},
    "a window and sinks": {"width": 1, "heads": 6, "groups": 2, "size": 48, "window": 300, "sinks": True},
    "prompts with a window and sinks": {"width": 20, "heads": 4, "groups": 2, "size": 32, "window": 100, "sinks": True},
    "values inside keys": {"width": 1, "heads": 20, "groups": 1, "size": 80, "latent": 64},
    "prompts with values inside keys": {"width": 17, "heads": 2, "groups": 1, "size": 48, "latent": 32},
    "int8": {"width": 2, "heads": 4, "groups": 2, "size": 16, "stored": "int8"},
    "float8": {"width": 2, "heads": 4, "groups": 2, "size": 16, "stored": "float8_e4m3fn"},
}
FAST = ["a window and sinks"]


@pytest.mark.parametrize(
    "case", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in CASES if name not in FAST)]
)
def test_the_interpreted_kernels_equal_the_reference(case: str) -> None:
    rest = dict(CASES[case])
    window, sinks = rest.pop("window", None), rest.pop("sinks", False)
    q, pools, table, positions = step(**rest)
    sink = jnp.linspace(-1, 2, q.shape[2]) if sinks else None
    arguments = {"scale": 0.3, "window": window, "sink": sink}
    expected = reference(q, pools, table, positions, **arguments)
    actual = paged_attention(q, pools, table, positions, interpret=True, **arguments)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)
    assert not np.asarray(actual[4]).any()


H100 = Device(name="H100", capability=(9, 0))
A100 = Device(name="A100", capability=(8, 0))
CPU = Device(name="cpu")
PLAIN = PagedRequest(dtype="bfloat16", stored="bfloat16", key_dim=128, value_dim=128)
CHOICES = [
    (H100, PLAIN, "triton", None),
    (CPU, PLAIN, "tiled", "needs an NVIDIA GPU, jax found cpu"),
    (Device(name="V100", capability=(7, 0)), PLAIN, "tiled", "runs from compute capability 8.0 on, V100 has 7.0"),
    (H100, replace(PLAIN, dtype="float32"), "tiled", "computes in bfloat16 or float16, not in float32"),
    (H100, replace(PLAIN, bias=True), "tiled", "has no bias of scores"),
    (H100, replace(PLAIN, key_dim=576, value_dim=512), "triton", None),
    (H100, replace(PLAIN, key_dim=592, value_dim=512), "tiled", "takes heads up to 576, not of 592 with values of 512"),
    (H100, replace(PLAIN, key_dim=72, value_dim=72), "tiled", "takes heads of a multiple of 16, not of 72"),
    (A100, replace(PLAIN, stored="int8"), "triton", None),
    (H100, replace(PLAIN, stored="float8_e4m3fn"), "triton", None),
    (A100, replace(PLAIN, stored="float8_e4m3fn"), "tiled", "float8_e4m3fn from compute capability 8.9 on, A100 has"),
    (H100, replace(PLAIN, stored="float32"), "tiled", "reads a cache in bfloat16, float16, int8, float8_e4m3fn, not"),
]


@pytest.mark.parametrize(("device", "request_", "kernel", "why"), CHOICES)
def test_auto_chooses_the_fastest_kernel_that_supports_all_layers(device, request_, kernel, why) -> None:
    choice = choose_paged("auto", [PagedRequest(), request_], device)
    assert choice.kernel == kernel and (why or "") in "; ".join(choice.reasons)
    assert bool(choice.reasons) == (why is not None)
    assert choose_paged(kernel, [request_], device).kernel == kernel


def test_an_unsupported_kernel_is_refused_with_an_alternative() -> None:
    assert list(PAGED_BACKENDS) == list(KERNELS)
    with pytest.raises(UserError) as caught:
        choose_paged("triton", [PLAIN, replace(PLAIN, bias=True)], H100, "engine.kernel")
    assert str(caught.value) == (
        "engine.kernel=triton: the Triton kernel of a paged cache has no bias of scores. "
        "Set engine.kernel=tiled or auto."
    )


def test_requests_of_models_have_their_head_sizes() -> None:
    request = PagedRequest(dtype="bfloat16", stored="int8")
    latent = load("deepseek.py:deepseek_v3").model.paged_requests(request)
    assert set(latent) == {replace(request, key_dim=576, value_dim=512)}
    llama = load("llama3.py:llama3_8b").model.paged_requests(request)
    assert set(llama) == {replace(request, key_dim=128, value_dim=128)}
    assert load("mamba2.py:mamba2_130m").model.paged_requests(request) == ()


def test_the_kernel_of_a_model_is_chosen_for_the_device_here(monkeypatch: pytest.MonkeyPatch) -> None:
    model = load("llama3.py:llama3_8b").model
    assert choose_kernel("auto", model, "bfloat16", "bfloat16") == "tiled"
    with pytest.raises(UserError, match=r"inference.kernel=triton: .* needs an NVIDIA GPU, jax found cpu"):
        choose_kernel("triton", model, "bfloat16", "bfloat16")
    monkeypatch.setattr("megajax.inference.assembly.local_device", lambda: H100)
    assert choose_kernel("auto", model, "bfloat16", "bfloat16") == "triton"
    assert choose_kernel("auto", model, "bfloat16", "float32") == "tiled"


@pytest.fixture(scope="module")
def compiler() -> None:
    try:
        devices.prepare()
    except UserError as error:
        pytest.skip(str(error).splitlines()[0])


def compiled(gpu: str, rows: int, width: int, heads: int, groups: int, size: int, **rest):
    """Kernels, and bytes of arguments and temporaries, of attention to a table of 8192 positions."""
    mesh, blocks = Mesh(np.array(devices.virtual_devices(Cluster(GPUS[gpu], 1, 8))), ("data",)), 2048
    stored, latent = rest.get("stored", jnp.bfloat16), rest.get("latent")

    def like(dtype, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P()))

    pool = like(stored, blocks, BLOCK, groups, size)
    scales = None if stored == jnp.bfloat16 else like(jnp.float32, blocks, BLOCK, groups)
    values = (None, None) if latent else (pool, scales)
    pools = Pools(pool, values[0], latent or size, scales, values[1])
    inputs = (
        like(jnp.bfloat16, rows, width, heads, size),
        pools,
        like(jnp.int32, rows, 512),
        like(jnp.int32, rows, width),
    )
    attend = partial(paged_attention, scale=0.1, window=rest.get("window"))
    with jax.set_mesh(mesh):
        island = jax.shard_map(attend, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
        program = jax.jit(island).lower(*inputs).compile(compiler_options=compiler_options(*GPU, *DEVICELESS))
    memory = program.memory_analysis()
    calls = re.findall(r'custom_call_target="(.*?)"', program.as_text())
    return calls, memory.argument_size_in_bytes, memory.temp_size_in_bytes


TRITON = "__gpu$xla.gpu.triton"
PROGRAMS = {
    "decoding, 70B on 8 devices": ((64, 1, 8, 1, 128), {}),
    "a prompt": ((1, 512, 32, 8, 128), {"window": 4096}),
    "decoding with latents": ((8, 1, 128, 1, 576), {"latent": 512}),
    "a prompt with latents": ((1, 512, 128, 1, 576), {"latent": 512}),
    "heads of 256": ((8, 1, 4, 2, 256), {}),
    "int8": ((8, 1, 8, 1, 128), {"stored": jnp.int8}),
    "float8": ((8, 1, 8, 1, 128), {"stored": jnp.float8_e4m3fn}),
}


@pytest.mark.slow
@pytest.mark.parametrize("gpu", ["a100-80gb", "h100", "b200"])
@pytest.mark.parametrize("case", PROGRAMS)
def test_the_kernels_compile_for_gpus_and_copy_no_pool(case: str, gpu: str, compiler: None) -> None:
    shape, rest = PROGRAMS[case]
    if gpu == "a100-80gb" and case == "float8":
        pytest.skip("refused by the capability table")
    calls, arguments, temporary = compiled(gpu, *shape, **rest)
    rows, width, heads, groups, size = shape
    assert calls == [TRITON] * (2 if width == 1 else 1)
    assert arguments > 2048 * BLOCK * groups * size
    partial_sums = 32 * rows * heads * (rest.get("latent", size) + 2) * 4 if width == 1 else 0
    assert temporary <= partial_sums + 4096, "the sums of 32 splits, and nothing of the size of the pool"
