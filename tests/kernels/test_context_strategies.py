"""Attention over sharded rows, by each strategy, against the reference on one device."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from sharded_rows import SCALE, Case, check, documents, on_devices, texts

from megajax.kernels.attention import pallas as pallas_attention
from megajax.kernels.attention.attention import PASSES, Passes, reference_forward
from megajax.kernels.attention.mask import Mask
from megajax.kernels.attention.pallas import Blocks
from megajax.kernels.context.ring import sources
from megajax.kernels.context.strategy import over_context
from megajax.mesh.zigzag_order import SequenceSharding

STRATEGIES = ("all_gather", "ring", "all_to_all", "ring+all_to_all")
EVERYTHING = Case(segments=documents(), window=9, sink=True, groups=2, size=24, wide=16)
FEATURES = {
    "causal": Case(),
    "a window shorter than a chunk": Case(window=3),
    "a window longer than a chunk": Case(window=20),
    "a window, many chunks": Case(window=3, length=128),
    "sinks": Case(sink=True),
    "two queries a key head": Case(groups=2),
    "four queries a key head": Case(heads=8, groups=2),
    "latent attention": Case(size=24, wide=16),
    "documents": Case(segments=documents()),
    "everything": EVERYTHING,
    "dropout": Case(rate=0.3, segments=documents()),
    "two rounds": Case(rounds=2, segments=documents()),
    "four rounds, a window": Case(rounds=4, window=9, length=128),
    "plain chunks": Case(rounds=0, segments=documents()),
    "both ways": Case(causal=False),
    "both ways, padded": Case(causal=False, padded=True, segments=texts()),
    "padded": Case(padded=True, segments=texts([40, 0])),
}
SLOW = pytest.mark.slow
FIRST = [("all_gather", 4, 1), ("ring", 4, 1), ("all_to_all", 2, 2), ("ring+all_to_all", 4, 1)]


def laid_out(case: Case, strategy: str, context: int, tensor: int = 1) -> Case:
    """With as many heads as the layout needs."""
    exchanging = {"all_to_all": context, "ring+all_to_all": 2}.get(strategy, 1)
    times = -(-exchanging * tensor // case.heads)
    sizes = {"heads": case.heads * times, "groups": case.groups * (times if tensor > case.groups else 1)}
    return replace(case, strategy=strategy, context=context, tensor=tensor, **sizes)


@pytest.mark.parametrize(("strategy", "context", "tensor"), FIRST)
def test_every_strategy_equals_one_device(strategy: str, context: int, tensor: int) -> None:
    """With documents across chunks, on their borders and one position long, a window, sinks, GQA and MLA together."""
    check(laid_out(EVERYTHING, strategy, context, tensor))


@SLOW
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", FEATURES)
def test_every_feature_equals_one_device(name: str, strategy: str) -> None:
    check(laid_out(FEATURES[name], strategy, 4))


@SLOW
@pytest.mark.parametrize(("context", "tensor"), [(2, 1), (8, 1), (4, 2)])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ["causal", "everything", "dropout", "both ways, padded"])
def test_every_layout_equals_one_device(name: str, strategy: str, context: int, tensor: int) -> None:
    check(laid_out(FEATURES[name], strategy, context, tensor))


def test_dropout_in_a_ring_equals_that_of_whole_rows() -> None:
    """Its random numbers follow positions in the row, wherever keys are stored."""
    check(Case(strategy="ring", context=2, rate=0.3, window=9, length=32))


def statistics(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Log-sum-exps of a strategy and of one device from the same inputs, [B, N, T]."""
    sharding = case.sharding()
    passes, mesh = over_context(sharding, "reference"), Mesh(np.array(jax.devices()[: case.context]), ("context",))

    def local(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        index = sharding.local_index(q.shape[1])
        return passes.forward(q, k, v, Mask(index, index, None, None), scale=SCALE)[1]

    rows = P(None, "context")
    program = jax.shard_map(local, mesh=mesh, in_specs=rows, out_specs=P(None, None, "context"), check_vma=False)
    order, (q, k, v, *_) = sharding.places(case.length), case.arrays()
    lse = jax.jit(program)(*(x[:, order] for x in (q, k, v)))
    assert lse.dtype == jnp.float32
    index = jnp.arange(case.length)
    exact = [x.astype(jnp.float32) for x in (q, k, v)]
    with jax.default_matmul_precision("highest"):
        expected = reference_forward(*exact, Mask(index, index, None, None), scale=SCALE)[1]
    return np.asarray(lse)[:, :, np.argsort(order)], np.asarray(expected)


@pytest.mark.parametrize("strategy", [*(pytest.param(s, marks=SLOW) for s in STRATEGIES if s != "ring"), "ring"])
def test_in_16_bits_statistics_are_in_float32(strategy: str) -> None:
    case = laid_out(Case(dtype=jnp.bfloat16, length=32), strategy, 4)
    np.testing.assert_allclose(*statistics(case), atol=1e-5)


@SLOW
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_in_16_bits_results_round_like_inputs(strategy: str) -> None:
    """bfloat16 keeps 8 bits, so rounding a number once changes it by up to 2^-9 of itself."""
    check(laid_out(replace(EVERYTHING, dtype=jnp.bfloat16), strategy, 4), most=2**-7)


@SLOW
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_documents_are_isolated_bitwise(strategy: str) -> None:
    """Another document changes no bit of the others' results and gradients, on any device."""

    class Changed(Case):
        def arrays(self) -> list[jax.Array]:
            *rows, sinks = Case.arrays(self)
            in_document = jnp.asarray(documents() == 3)[..., None, None]
            return [*(jnp.where(in_document, x + 1, x) for x in rows), sinks]

    case = laid_out(Case(segments=documents(), groups=2), strategy, 4)
    changed = Changed(**{name: getattr(case, name) for name in case.__dataclass_fields__})
    for value, changed_value in zip(on_devices(case)[:4], on_devices(changed)[:4], strict=True):
        np.testing.assert_array_equal(value[documents() != 3], changed_value[documents() != 3])
        assert (value != changed_value)[documents() == 3].any()


INTERPRETED = {"interpret": True, "blocks": Blocks(16, 16, 4)}
PALLAS = Passes(partial(pallas_attention.forward, **INTERPRETED), partial(pallas_attention.backward, **INTERPRETED))


@pytest.mark.parametrize("strategy", [*(pytest.param(s, marks=SLOW) for s in STRATEGIES if s != "ring"), "ring"])
def test_the_pallas_kernels_take_positions_in_zigzag(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(EVERYTHING, size=32, wide=16) if strategy != "ring" else Case(size=16, wide=16, segments=documents())
    check(laid_out(case, strategy, 2), PALLAS)


def test_a_ring_skips_devices_whose_keys_no_window_reaches() -> None:
    index = jnp.arange(8)
    mask = Mask(index, index, None, None)
    for devices, rounds, window, expected in (
        (8, 1, None, [0, 1, 2, 3, 4, 5, 6, 7]),
        (8, 1, 0, [0]),
        (8, 1, 1, [0, 1, 7]),
        (8, 1, 4, [0, 1, 7]),
        (8, 1, 5, [0, 1, 2, 6, 7]),
        (2, 1, 3, [0, 1]),
        (8, 2, 2, [0, 1, 7]),
        (8, 0, 8, [0, 1]),
        (8, 0, 9, [0, 1, 2]),
    ):
        assert sources(SequenceSharding(devices, rounds, "ring"), 8, mask._replace(window=window)) == expected
    assert sources(SequenceSharding(4, 0, "ring"), 8, mask._replace(window=1, causal=False)) == [0, 1, 2, 3]


def test_only_the_reference_has_dropout_in_strategies() -> None:
    assert [name for name in PASSES if over_context(SequenceSharding(2, 1, "ring"), name).dropout] == ["reference"]
