"""Drafts that are chosen with the random numbers of the model: the law of the tokens, and how many drafts it accepts.

The oracle's cases have the probabilities by which each token of a draft is chosen, those of the model, and the
probability with which rejection sampling accepts it.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from megatron_cases import FURTHER

from megajax.inference.sampling.choose import Choosing, Drawing, RowSampling, choose
from megajax.mesh.config import ParallelConfig
from megajax.mesh.layout import Layout
from megajax.mesh.sharding_rules import Plan

FILE = FURTHER / "speculative" / "acceptance.npz"
if not FILE.is_file():
    pytest.skip(f"no {FILE}", allow_module_level=True)
ARRAYS = np.load(FILE)
CASES = sorted({name.partition("/")[0] for name in ARRAYS})
SEEDS, SIGMAS = 20_000, 5
"""Frequencies over the seeds differ from probabilities by less than this many standard deviations, and one count: the
probability that one of 2,000 compared numbers fails is below 0.002."""
CHOOSE = jax.jit(choose, static_argnums=(0, 1, 2, 3))


def chosen(probabilities: np.ndarray) -> np.ndarray:
    """Tokens of each seed for probabilities [N, V] of N tokens in a row, [SEEDS, N]."""
    layout, (count, size) = Layout(Plan.of(ParallelConfig(data_sharding="replicate"))), probabilities.shape
    logits = jnp.log(np.maximum(np.tile(probabilities, (SEEDS, 1)), 1e-30)).astype(jnp.float32)
    rows = SEEDS * count
    seeds = np.stack([np.full(rows, 3), np.repeat(np.arange(SEEDS), count)], -1).astype(np.uint32)
    ones, numbers = np.ones(rows, np.float32), np.tile(np.arange(count, dtype=np.int32), SEEDS)
    drawing = Drawing(ones, 0 * numbers, ones, 0 * ones, seeds, numbers)
    tokens = CHOOSE(layout, size, Choosing.SAMPLED, 1, logits, RowSampling(drawing)).token
    return np.asarray(tokens).reshape(SEEDS, count)


def agreement(p: np.ndarray, q: np.ndarray) -> float:
    """Probability that the Gumbel-max method chooses the same token from p and q with the same noise."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.fmax(p[None] / p[:, None], q[None] / q[:, None])
        terms = 1 / ratios.sum(-1)
    return float(terms[(p > 0) & (q > 0)].sum())


def assert_frequencies(counts: np.ndarray, total: int, probabilities: np.ndarray) -> None:
    bound = SIGMAS * np.sqrt(total * probabilities * (1 - probabilities)) + 1
    assert (np.abs(counts - total * probabilities) <= bound).all()


@pytest.mark.parametrize("case", CASES)
def test_tokens_have_the_law_of_the_model_and_drafts_agree_as_often_as_the_formula_says(case: str) -> None:
    draft, target = ARRAYS[f"{case}/draft_probs"], ARRAYS[f"{case}/target_probs"]
    drafted, tokens, size = chosen(draft), chosen(target), draft.shape[1]
    reached, accepted = np.full(SEEDS, True), 0.0
    for place, (p, q) in enumerate(zip(target, [*draft, None], strict=True)):
        counts = np.bincount(tokens[reached, place], minlength=size)
        assert_frequencies(counts, int(reached.sum()), p)
        if q is None:
            break
        same, expected = drafted[:, place] == tokens[:, place], agreement(p, q)
        assert_frequencies(np.array([same.sum()]), SEEDS, np.array([expected]))
        overlap = float(np.minimum(p, q).sum())
        assert overlap / (2 - overlap) - 1e-9 <= expected <= overlap + 1e-9, "rejection sampling accepts `overlap`"
        accepted += overlap
        token = ARRAYS[f"{case}/draft_tokens"][place]
        np.testing.assert_allclose(min(1.0, p[token] / q[token]), ARRAYS[f"{case}/accept_prob"][place], atol=1e-12)
        reached &= same
    if (draft == target[:-1]).all():
        assert reached.all() and accepted == pytest.approx(len(draft))
