"""Drafts by a second model: the answers of steps without drafts, in fewer steps."""

import random
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from compiled_steps import loaded, programs_of
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from test_engine import Client, serve
from test_programs import HEADS, MAMBA, ROPE, VOCABULARY, decoder
from test_speculation import SETTINGS

from megajax.inference.device import ModelDevice
from megajax.inference.engine import Engine, Statistics
from megajax.inference.loaded_model import Draft, LoadedModel, layers_apart
from megajax.inference.programs import CacheSize
from megajax.inference.sampling.chooser import choosers
from megajax.inference.speculation.draft_model import ByDevice, DraftModel
from megajax.inference.weights.refit import ModelWeights
from megajax.mesh.layout import Layout

HYBRID = replace(decoder(MAMBA, replace(HEADS, rope=ROPE)), sequence_length=64)
TARGET = replace(decoder(replace(HEADS, rope=ROPE), repeats=2), sequence_length=64)
SMALLER = replace(decoder(replace(HEADS, heads=2, rope=ROPE)), sequence_length=64)
DRAFTS, ROWS, TILE = 4, 3, 4


def device_of(
    model: LoadedModel,
    draft: LoadedModel | None,
    *,
    drafts: int = DRAFTS,
    blocks: int = 24,
    tile: int = TILE,
    snapshots: int = 0,
) -> ModelDevice:
    """With steps of 3 rows, and blocks of 4 tokens."""

    def drafting(size: CacheSize, **settings: Any) -> DraftModel | None:
        return DraftModel(Draft(draft, "draft"), size, vocabulary=VOCABULARY, **settings) if draft is not None else None

    programs = programs_of(
        model,
        choosers(VOCABULARY),
        chunks=(0, 8),
        tile=tile,
        drafts=drafts,
        blocks=blocks,
        snapshots=snapshots,
        length=64,
        rows=ROWS,
        drafting=drafting,
    )
    return ModelDevice(programs, VOCABULARY)


def answers(device: ModelDevice, kinds: Any = SETTINGS * 2, *, tokens: int = 40) -> tuple[list[Client], Statistics]:
    """The answers to prompts with shared prefixes, all at the same time."""
    draw = random.Random(4)
    heads = [[draw.randrange(VOCABULARY) for _ in range(15)] for _ in range(2)]
    clients = [Client([*heads[number % 2], number], max_tokens=tokens, **kind) for number, kind in enumerate(kinds)]
    drafting = device.programs.drafting
    engine = Engine(device, drafter=ByDevice if drafting is None else drafting.drafter)
    serve(engine, *clients)
    return clients, engine.statistics()


def compare(plain: list[Client], drafted: list[Client]) -> None:
    """Asserts equal tokens, ends and scores."""
    for first, second in zip(plain, drafted, strict=True):
        for expected, answer in zip(first.answers(), second.answers(), strict=True):
            assert (answer.tokens, answer.finish) == (expected.tokens, expected.finish)
            for one, other in zip(expected.scores, answer.scores, strict=True):
                assert (one.token, one.rank) == (other.token, other.rank)
                np.testing.assert_allclose(one.logprob, other.logprob, atol=1e-4)


@pytest.fixture(scope="module")
def plain_device() -> ModelDevice:
    """Without drafts."""
    return device_of(loaded(TARGET, {}), None, drafts=0)


@pytest.fixture(scope="module")
def plain(plain_device: ModelDevice) -> tuple[list[Client], Statistics]:
    return answers(plain_device)


@pytest.fixture(scope="module")
def drafted() -> tuple[list[Client], Statistics]:
    """By a smaller model."""
    return answers(device_of(loaded(TARGET, {}), loaded(SMALLER, {}, seed=1)))


type Answers = tuple[list[Client], Statistics]


@pytest.mark.slow
def test_a_smaller_model_drafts_and_the_answers_stay(plain: Answers, drafted: Answers) -> None:
    clients, counts = drafted
    compare(plain[0], clients)
    assert counts.preemptions_total > 0 and counts.shared_tokens_total > 0
    assert counts.drafted_tokens_total > counts.accepted_tokens_total


PLAIN = ({}, {"temperature": 1, "seed": 1, "n": 2}, {"temperature": 0.8, "top_p": 0.9, "seed": 2}, {"logprobs": 2})


@pytest.fixture(scope="module")
def itself() -> ModelDevice:
    """A model that drafts its own tokens."""
    model = loaded(TARGET, {})
    return device_of(model, layers_apart(model))


@pytest.mark.slow
@pytest.mark.parametrize("drafts", [1, DRAFTS])
def test_all_drafts_of_the_model_itself_are_accepted(
    itself: ModelDevice, plain_device: ModelDevice, drafts: int
) -> None:
    device = itself if drafts == DRAFTS else device_of(*[loaded(TARGET, {})] * 2, drafts=drafts)
    before, _ = answers(plain_device, PLAIN * 3)
    clients, counts = answers(device, PLAIN * 3)
    compare(before, clients)
    assert counts.preemptions_total > 0 and counts.shared_tokens_total > 0
    assert 0 < counts.accepted_tokens_total == counts.drafted_tokens_total


@pytest.mark.slow
def test_a_model_without_states_drafts_for_one_with_states() -> None:
    model, sizes = loaded(HYBRID, {}), {"tile": 8, "snapshots": 2}
    (before, _), (clients, counts) = (
        answers(device_of(model, draft, drafts=drafts, **sizes))
        for draft, drafts in ((None, 0), (loaded(SMALLER, {}, seed=1), DRAFTS))
    )
    compare(before, clients)
    assert counts.preemptions_total > 0 and counts.shared_tokens_total > 0
    assert counts.drafted_tokens_total > counts.accepted_tokens_total > 0


LAYOUTS = {"sharded": True, "whole": False}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sharded", "whole"])
def test_answers_on_several_devices(name: str, plain: Answers, drafted: Answers) -> None:
    """Of replicas and `tensor`; the draft model is sharded, or each device has all of it."""
    sizes = {"data": 2, "tensor": 2}
    model, draft = loaded(TARGET, sizes), loaded(SMALLER, sizes, seed=1)
    if not LAYOUTS[name]:
        layout = Layout(draft.layout.plan.over_batch())
        whole = NamedSharding(draft.mesh, PartitionSpec())
        weights = {path: jax.device_put(w, whole) for path, w in draft.weights.items()}
        abstract = nnx.eval_shape(lambda: SMALLER.build(layout))
        draft = replace(draft, model=abstract, weights=weights, layout=layout)
    clients, counts = answers(device_of(model, draft, blocks=16))
    compare(plain[0], clients)
    share, expected = (each.accepted_tokens_total / each.drafted_tokens_total for each in (counts, drafted[1]))
    assert share == pytest.approx(expected, abs=0.05) and counts.preemptions_total > 0


def test_rows_without_drafts_of_their_own_keep_the_cache_of_the_draft_model(itself: ModelDevice) -> None:
    """As those with a guide: a row that shares their blocks has drafts as good as those of a row alone."""
    engine = Engine(itself, drafter=ByDevice)
    first = Client(range(9), max_tokens=30)
    engine.submit(first.request)
    engine.schedulers[0].waiting[0].drafter = None
    serve(engine)
    assert engine.statistics().drafted_tokens_total == 0
    later = Client([*range(9), *first.answer.tokens], max_tokens=16)
    serve(engine, later)
    counts = engine.statistics()
    assert counts.shared_tokens_total >= 36 and 0 < counts.accepted_tokens_total == counts.drafted_tokens_total


@pytest.mark.slow
def test_blocks_behind_the_windows_of_both_models_are_freed() -> None:
    """The wider window counts; without one in a model, none is freed."""
    windows = [decoder(replace(HEADS, rope=ROPE, window=window)) for window in (5, 9, None)]
    narrow, wide, whole = (loaded(replace(cfg, sequence_length=64), {}) for cfg in windows)
    assert [device_of(narrow, draft).window for draft in (None, wide, narrow, whole)] == [5, 9, 5, None]
    (before, _), (clients, counts) = (
        answers(device_of(narrow, draft, drafts=3), PLAIN[1:3] * 2) for draft in (None, narrow)
    )
    compare(before, clients)
    assert 0 < counts.accepted_tokens_total == counts.drafted_tokens_total


def test_a_draft_model_sleeps_with_its_model(itself: ModelDevice) -> None:
    """And drafts as before, also for a request that began before."""
    draft_model: Any = itself.programs.drafting
    engine = Engine(itself, drafter=ByDevice, weights=ModelWeights(itself.programs))
    client = Client(range(9), max_tokens=30)
    engine.submit(client.request)
    for _ in range(3):
        engine.step()
    engine.sleep()
    assert not draft_model.weights and "cache" not in vars(draft_model)
    engine.wake()
    serve(engine)
    counts = engine.statistics()
    assert len(client.answer.tokens) == 30 and counts.accepted_tokens_total == counts.drafted_tokens_total > 20


def test_the_program_copies_neither_its_cache_nor_weights() -> None:
    """Also in the loop over the tokens of a draft."""
    model = layers_apart(loaded(replace(SMALLER, hidden=512), {}))
    draft_model: Any = device_of(loaded(TARGET, {}), model, blocks=2000).programs.drafting
    analysis: Any = draft_model.lowered(draft_model.buckets[0]).compile().memory_analysis()
    largest = [max(x.nbytes for x in jax.tree.leaves(tree)) for tree in (model.weights, draft_model.cache)]
    assert analysis.temp_size_in_bytes < min(largest)
