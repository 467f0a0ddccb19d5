"""The sampler against a numpy version of each setting, closed forms, and itself on several devices."""

import jax
import numpy as np
import pytest

from megajax.config.bounds import rules
from megajax.inference.sampling.choose import Choosing, Drawing, Edits, RowSampling, choose, keep_mask
from megajax.inference.sampling_settings import NUMBERS
from megajax.kernels.cross_entropy import VocabularyShard
from megajax.mesh.config import ParallelConfig
from megajax.mesh.layout import Layout
from megajax.mesh.mesh import build_mesh
from megajax.mesh.sharding_rules import Plan

ROWS, IDS, SIZE, TOP = 8, 64, 61, 5
CFG = ParallelConfig(data_sharding="replicate", sequence=False)
LAYOUT = Layout(Plan.of(CFG))
CHOOSE = jax.jit(choose, static_argnums=(0, 1, 2, 3))


def drawing(count: int = ROWS, **settings: object) -> Drawing:
    neutral = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "number": 0} | settings
    dtypes = {"top_k": np.int32, "number": np.int32}
    seed = neutral.pop("seed", np.stack([np.zeros(count), np.arange(count)], -1))
    arrays = {
        name: np.broadcast_to(np.asarray(value, dtypes.get(name, np.float32)), count) for name, value in neutral.items()
    }
    return Drawing(**arrays, seed=np.asarray(seed, np.uint32))


def edits(count: int = ROWS, width: int = 3, **settings: object) -> Edits:
    neutral = {
        "allowed": np.full((count, IDS // 32), 2**32 - 1),
        "tokens": np.full((count, width), -1),
        "biases": np.zeros((count, width)),
        "repetition": np.ones(count),
        "presence": np.zeros(count),
        "frequency": np.zeros(count),
        "prompt": np.full(count, 4),
        "length": np.full(count, 9),
        "listed": np.tile([5, 60, -1], (count, 1)),
    }
    dtypes = {"allowed": np.uint32, **dict.fromkeys(("tokens", "prompt", "length", "listed"), np.int32)}
    return Edits(
        **{name: np.asarray(value, dtypes.get(name, np.float32)) for name, value in (neutral | settings).items()}
    )


def rows_tokens(generator: np.random.Generator, length: int = 12) -> np.ndarray:
    tokens = generator.integers(0, SIZE, (ROWS, length)).astype(np.int32)
    tokens[:, 7] = tokens[:, 6]
    return tokens


def mask(allowed: np.ndarray) -> np.ndarray:
    """bool [R, V] -> uint32 [R, V / 32]."""
    bits = allowed.reshape(len(allowed), -1, 32).astype(np.uint64) << np.arange(32, dtype=np.uint64)
    return bits.sum(-1).astype(np.uint32)


def everything(generator: np.random.Generator) -> tuple[np.ndarray, RowSampling, np.ndarray]:
    """Rows with every kind of setting: logits, settings and tokens."""
    logits = (generator.normal(size=(ROWS, IDS)) * 3).astype(np.float32)
    rows = RowSampling(
        drawing(
            temperature=[0, 1, 0.7, 1.5, 1, 1, 0, 2],
            top_k=[0, 5, 0, 7, 0, 0, 3, 0],
            top_p=[1, 1, 0.6, 0.9, 0.99, 1, 0.5, 1],
            min_p=[0, 0, 0, 0.01, 0, 0.3, 0, 0],
            number=np.arange(ROWS),
        ),
        edits(
            allowed=mask(generator.random((ROWS, IDS)) < 0.8),
            tokens=[[3, 60, -1]] * ROWS,
            biases=[[-np.inf, 2.5, 9]] * ROWS,
            repetition=[1, 1.3, 1, 0.8, 1, 2, 1.1, 1],
            presence=[0, 0.5, 0, 0, -1, 0, 2, 0],
            frequency=[0, 0, 0.4, 0, 0.3, 0, -0.2, 0],
        ),
    )
    return logits, rows, rows_tokens(generator)


def by_hand(logits: np.ndarray, rows: RowSampling, history: np.ndarray) -> np.ndarray:
    """Probabilities of the tokens of each row, float64 [R, SIZE], by the definitions of the settings, row by row."""
    out = np.zeros((len(logits), SIZE))
    for row in range(len(logits)):
        x = logits[row, :SIZE].astype(np.float64)
        for token in range(SIZE):
            if not int(rows.edits.allowed[row, token // 32]) >> (token % 32) & 1:
                x[token] = -np.inf
        for token, bias in zip(rows.edits.tokens[row], rows.edits.biases[row], strict=True):
            if token >= 0:
                x[token] += bias
        tokens = history[row, : rows.edits.length[row]].tolist()
        answer = tokens[rows.edits.prompt[row] :]
        for token in set(tokens):
            x[token] = x[token] / rows.edits.repetition[row] if x[token] > 0 else x[token] * rows.edits.repetition[row]
        for token in set(answer):
            x[token] -= rows.edits.frequency[row] * answer.count(token) + rows.edits.presence[row]
        out[row] = probabilities(x, *(array[row] for array in rows.drawing[:4]))
    return out


def probabilities(x: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """The probabilities of one row of logits, float64 [V], by sorting."""
    if temperature == 0:
        return np.eye(len(x))[x.argmax()]
    p = np.exp((x - x.max()) / np.float64(temperature))
    p /= p.sum()
    p[p < p.max() * np.float64(min_p)] = 0
    if 0 < top_k < len(p):
        p[p < np.sort(p)[-top_k]] = 0
    p /= p.sum()
    if top_p < 1:
        order = np.argsort(-p, kind="stable")
        before = np.cumsum(p[order]) - p[order]
        p[order[before >= np.float64(top_p)]] = 0
    return p / p.sum()


def test_filters_equal_a_sort() -> None:
    generator = np.random.default_rng(1)
    logits = (generator.normal(size=(64, SIZE)) * generator.uniform(0.1, 6, (64, 1))).astype(np.float32)
    settings = drawing(
        64,
        temperature=generator.choice([0.3, 1, 2], 64),
        top_k=generator.integers(0, 70, 64),
        top_p=generator.choice([1e-6, 0.3, 0.8, 0.95, 0.999, 1], 64),
        min_p=generator.choice([0, 0, 0.02, 0.5, 1], 64),
    )
    scaled = (logits - logits.max(1, keepdims=True)) / settings.temperature[:, None]
    keep = np.asarray(jax.jit(keep_mask)(scaled, settings, VocabularyShard(0, SIZE, ())))
    expected = [probabilities(x, *(array[row] for array in settings[:4])) > 0 for row, x in enumerate(logits)]
    np.testing.assert_array_equal(keep, expected)
    assert 1 == keep.sum(1).min() < keep.sum(1).max() == SIZE


def test_equal_logits_at_the_border_are_kept_together() -> None:
    x = np.asarray([[0, -1, -1, -1, -2, 0.0, -0.0]], np.float32)
    keep = jax.jit(keep_mask)(x, drawing(1, top_k=4), VocabularyShard(0, 7, ()))
    assert np.asarray(keep)[0].tolist() == [True, True, True, True, False, True, True]


def test_frequencies_equal_the_probabilities() -> None:
    """Chi-square over 1500 draws of each kind of row, with fixed seeds."""
    logits, rows, tokens = everything(np.random.default_rng(2))
    samples = draws(1500, logits, rows, tokens)
    expected = by_hand(logits, rows, tokens) * len(samples)
    for row in range(ROWS):
        counts = np.bincount(samples[:, row], minlength=SIZE)
        assert not counts[expected[row] == 0].any()
        often = expected[row] >= 5
        observed = np.append(counts[often], counts[~often].sum())
        expected_counts = np.append(expected[row, often], expected[row, ~often].sum())
        statistic = (
            (observed - expected_counts)[expected_counts > 0] ** 2 / expected_counts[expected_counts > 0]
        ).sum()
        freedom = max(often.sum(), 1)
        # The mean of chi-square is its degrees of freedom, the variance twice that.
        assert statistic < freedom + 4 * np.sqrt(2 * freedom), (row, statistic, freedom)


def draws(count: int, logits: np.ndarray, rows: RowSampling, tokens: np.ndarray) -> np.ndarray:
    """The first tokens of each row under this many seeds, int [count, ROWS]."""
    samples = []
    for number in range(count):
        seed = np.stack([np.full(ROWS, number), np.arange(ROWS)], -1).astype(np.uint32)
        first = rows._replace(drawing=rows.drawing._replace(seed=seed))
        samples.append(CHOOSE(LAYOUT, SIZE, Choosing.FULL, TOP, logits, first, tokens).token)
    return np.asarray(samples)


def test_scores_are_those_of_the_model_without_settings() -> None:
    logits, rows, tokens = everything(np.random.default_rng(3))
    result = CHOOSE(LAYOUT, SIZE, Choosing.FULL, TOP, logits, rows, tokens)
    x = logits[:, :SIZE].astype(np.float64)
    logprobs = x - np.log(np.exp(x).sum(1, keepdims=True))
    token = np.asarray(result.token)
    first = np.take_along_axis(logprobs, token[:, None], 1)
    np.testing.assert_allclose(result.logprob, first[:, 0], atol=1e-5)
    np.testing.assert_array_equal(result.scores.rank, 1 + (logprobs > first).sum(1))
    order = np.argsort(-logprobs, 1, kind="stable")[:, :TOP]
    np.testing.assert_array_equal(result.scores.top, order)
    np.testing.assert_allclose(result.scores.logprobs, np.take_along_axis(logprobs, order, 1), atol=1e-5)
    np.testing.assert_allclose(result.listed[:, :2], logprobs[:, [5, 60]], atol=1e-5)


@pytest.mark.parametrize("edge", ["at_least", "at_most"])
@pytest.mark.parametrize("temperature", [0, 1])
def test_the_edges_of_a_repetition_penalty_keep_ids_that_are_not_allowed_out(edge: str, temperature: float) -> None:
    logits, _, _ = everything(np.random.default_rng(8))
    allowed = np.arange(IDS)[None] == np.arange(ROWS)[:, None]
    repetition = np.full(ROWS, getattr(next(rules(NUMBERS["repetition_penalty"])), edge))
    # Of every row, all ids but one are not allowed, and penalized.
    tokens = np.tile(np.arange(SIZE, dtype=np.int32), (ROWS, 1))
    rows = RowSampling(
        drawing(temperature=temperature),
        edits(allowed=mask(allowed), repetition=repetition, prompt=np.zeros(ROWS), length=np.full(ROWS, SIZE)),
    )
    result = CHOOSE(LAYOUT, SIZE, Choosing.FULL, TOP, logits, rows, tokens)
    np.testing.assert_array_equal(result.token, np.arange(ROWS))


def test_rows_do_not_depend_on_their_neighbours() -> None:
    generator = np.random.default_rng(6)
    first, second = everything(generator), everything(generator)
    expected = CHOOSE(LAYOUT, SIZE, Choosing.FULL, TOP, *first)
    order = generator.permutation(ROWS)

    def mixed(first: np.ndarray, second: np.ndarray) -> np.ndarray:
        """Puts half of the rows, in another order, among other rows."""
        out = np.array(second)
        out[order[:4]] = first[:4]
        return out

    among = CHOOSE(LAYOUT, SIZE, Choosing.FULL, TOP, *jax.tree.map(mixed, first, second))
    first, second = jax.tree.map(lambda x: x[:4], expected), jax.tree.map(lambda x: x[order[:4]], among)
    jax.tree.map(np.testing.assert_array_equal, first, second)


def test_a_token_does_not_depend_on_the_program() -> None:
    logits, rows, tokens = everything(np.random.default_rng(7))
    plain = rows._replace(edits=edits())
    full, sampled = (CHOOSE(LAYOUT, SIZE, program, TOP, logits, plain, tokens) for program in (Choosing.FULL, 1))
    np.testing.assert_array_equal(sampled.token, full.token)
    np.testing.assert_allclose(sampled.logprob, full.logprob, atol=1e-6)
    assert sampled.scores is None
    greedy = CHOOSE(LAYOUT, SIZE, Choosing.GREEDY, TOP, logits, RowSampling())
    np.testing.assert_array_equal(greedy.token, logits[:, :SIZE].argmax(1))
    equal = np.zeros((ROWS, IDS), np.float32)
    equal[:, [9, 30]] = 1
    first = CHOOSE(LAYOUT, SIZE, Choosing.GREEDY, TOP, equal, RowSampling())
    assert np.asarray(first.token).tolist() == [9] * ROWS, "of equal logits"
    still = plain._replace(drawing=drawing(temperature=0))
    np.testing.assert_array_equal(greedy.token, CHOOSE(LAYOUT, SIZE, Choosing.FULL, TOP, logits, still, tokens).token)


@pytest.mark.parametrize(("tensor", "data"), [(4, 1), (2, 2)])
def test_devices_change_nothing(tensor: int, data: int) -> None:
    """A sharded vocabulary gives the same bits; with two replicas, one of them filters and the other does not."""
    logits, rows, tokens = everything(np.random.default_rng(8))
    if data == 2:
        rows = rows._replace(drawing=rows.drawing._replace(top_p=np.where(np.arange(ROWS) < 4, rows.drawing.top_p, 1)))
    unsharded = CHOOSE(LAYOUT, SIZE, Choosing.FULL, TOP, logits, rows, tokens)
    cfg = ParallelConfig(tensor=tensor, data=data, data_sharding="replicate", sequence=False)
    layout = Layout(Plan.of(cfg))
    with jax.set_mesh(build_mesh(cfg, jax.devices()[: tensor * data])):
        compiled = CHOOSE.lower(layout, SIZE, Choosing.FULL, TOP, logits, rows, tokens).compile()
        sharded = compiled(logits, rows, tokens)
    np.testing.assert_array_equal(sharded.token, unsharded.token)
    np.testing.assert_array_equal(sharded.scores.rank, unsharded.scores.rank)
    np.testing.assert_array_equal(sharded.scores.top, unsharded.scores.top)
    np.testing.assert_allclose(sharded.logprob, unsharded.logprob, atol=1e-5)
    np.testing.assert_allclose(sharded.scores.logprobs, unsharded.scores.logprobs, atol=1e-5)
    np.testing.assert_allclose(sharded.listed[:, :2], unsharded.listed[:, :2], atol=1e-5)
    # No device has the logits, or the noise, of more than its part of the vocabulary.
    text = compiled.as_text()
    assert f"f32[{ROWS // data},{IDS // tensor}]" in text
    assert f"f32[{ROWS // data},{IDS}]" not in text


def test_log_probabilities_are_those_of_the_distribution_drawn_from() -> None:
    logits, rows, history = everything(np.random.default_rng(7))
    chosen = CHOOSE(LAYOUT, SIZE, Choosing.FULL, TOP, logits, rows, history)
    wanted = np.log(by_hand(logits, rows, history)[np.arange(ROWS), chosen.token])
    np.testing.assert_allclose(chosen.drawn, wanted, atol=2e-6)
    # Without settings, this is the model's distribution, bit for bit and in each program.
    plain = RowSampling(drawing(), edits())
    full, sampled = (
        CHOOSE(LAYOUT, SIZE, program, TOP, logits, plain, history) for program in (Choosing.FULL, Choosing.SAMPLED)
    )
    assert (full.token == sampled.token).all() and (full.drawn == sampled.logprob).all()
    assert (sampled.drawn == sampled.logprob).all() and (full.logprob == sampled.logprob).all()


def test_nonfinite_logits_give_no_token() -> None:
    logits, rows, tokens = everything(np.random.default_rng(9))
    logits[1, 5], logits[2, 6], logits[3, 7], logits[4, SIZE] = np.nan, np.inf, -np.inf, np.nan
    rows.edits.allowed[5] = 0
    result = CHOOSE(LAYOUT, SIZE, Choosing.FULL, TOP, logits, rows, tokens)
    assert np.asarray(result.finite).tolist() == [True, False, False, False, True, True, True, True]
    assert (np.asarray(result.token) < 0).tolist() == [False, True, True, True, False, True, False, False]


def test_noise_does_not_depend_on_padding() -> None:
    """The same tokens for any padding of the vocabulary."""
    logits, rows, _ = everything(np.random.default_rng(10))
    wide = np.pad(logits, ((0, 0), (0, 64)))
    first, second = (
        CHOOSE(LAYOUT, SIZE, Choosing.SAMPLED, TOP, array, RowSampling(rows.drawing)).token for array in (logits, wide)
    )
    np.testing.assert_array_equal(first, second)
