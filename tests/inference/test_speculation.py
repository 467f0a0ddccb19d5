"""Speculative decoding: the answers of steps without drafts, in fewer steps."""

import random
import re
from collections import abc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from compiled_steps import Logits, Row, Step, loaded, programs_of, whole_logits
from stand_in import Known, StandIn, at_once, check, hashed
from test_engine import Client, demand_equal, serve
from test_generate_terminal import session
from test_programs import HEADS, LENGTH, MAMBA, MODELS, ROPE, VOCABULARY, decoder
from user_errors import user_error

from megajax.config.compose import problems_of
from megajax.inference.admission import AnswerRules
from megajax.inference.assembly import make_engine
from megajax.inference.config import InferenceConfig
from megajax.inference.device import ModelDevice
from megajax.inference.engine import Engine
from megajax.inference.request import Output, Sampled, Sequence
from megajax.inference.sampling.chooser import choosers
from megajax.inference.sampling_settings import Sampling
from megajax.inference.scheduler import BlockPool, Scheduler
from megajax.inference.speculation.earlier_text import EarlierText
from megajax.inference.worker import Worker
from megajax.layers.cache_spec import CacheLeaf, latest_leaves
from megajax.layers.mamba.config import Mamba2Config
from megajax.server.metrics import VLLM_STATISTICS, Readiness
from megajax.tokenizers.config import ByteTokenizerConfig


def test_a_draft_continues_the_longest_match() -> None:
    def draft(tokens: list[int]) -> list[int]:
        return EarlierText(3).draft(tokens)

    assert draft([1, 2, 3, 4, 5, 9, 2, 3]) == [4, 5, 9]
    assert draft([8, 2, 3, 4, 9, 2, 3, 5, 8, 2, 3]) == [4, 9, 2], "three equal tokens before two later ones"
    assert draft([2, 3, 4, 9, 2, 3, 5, 8, 2, 3]) == [5, 8, 2], "the latest of equal matches"
    assert draft([1, 2, 3, 4, 2]) == draft([1]) == draft([1, 2]) == []


def test_a_draft_repeats_a_short_period() -> None:
    assert EarlierText(5).draft([7, 4, 4, 4]) == [4] * 5
    assert EarlierText(5).draft([7, 1, 2, 1, 2]) == [1, 2, 1, 2, 1]


def test_a_growing_text_has_the_drafts_of_a_new_one() -> None:
    draw, tokens, growing = random.Random(1), [0], EarlierText(4)
    for _ in range(300):
        tokens += [draw.randrange(3) for _ in range(draw.randint(1, 4))]
        assert growing.draft(tokens) == EarlierText(4).draft(tokens)


TEXT = ByteTokenizerConfig().build()


class Repeating(StandIn):
    """The next token is one of a few and depends on the last three, so that texts soon repeat themselves, and a draft
    of two equal tokens may be wrong."""

    def candidates(self, row: Sequence, tokens: abc.Sequence[int], ahead: int = 0) -> list[int]:
        seed = row.seed if row.sampling.temperature > 0 else 0
        first = LETTERS[hashed(tokens[-3:], len(LETTERS), seed)]
        others = [token for token in range(self.vocabulary) if token != first]
        return [token for token in (first, *others) if token not in row.forbidden(ahead)]


LETTERS, END = tuple(range(97, 103)), 98
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1, "seed": 3, "n": 2},
    {"logprobs": 2},
    {"min_tokens": 9, "stop_tokens": (99, 100)},
    {"stop_tokens": (101,)},
    {"stop": ("ab", "ca"), "include_stop": True},
    {"stop": ("fd",), "min_tokens": 5},
    {"prompt_logprobs": 1},
    {"temperature": 1, "seed": 4, "best_of": 3, "logprobs": 1},
)


def answers(device: StandIn, seed: int) -> tuple[list[list[Output]], Engine]:
    """The answers to random requests that arrive one after another; some continue an earlier answer."""
    draw = random.Random(seed)
    engine = Engine(device, AnswerRules(tokenizer=TEXT, end_tokens=(END,), seed=seed))
    clients: list[Client] = []
    for _ in range(25):
        kind = {**draw.choice(KINDS), "max_tokens": draw.randint(10, 40), "ignore_eos": draw.random() < 0.8}
        prompt = [draw.choice(LETTERS) for _ in range(draw.randint(1, 12))]
        if clients and draw.random() < 0.4:
            serve(engine)
            earlier = draw.choice(clients)
            prompt = [*earlier.request.prompt, *earlier.answers()[0].tokens, *prompt][:50]
        clients.append(Client(prompt, **kind))
        engine.submit(clients[-1].request)
        for _ in range(draw.randint(0, 2)):
            engine.step()
    serve(engine)
    for client in clients:
        if client.request.sampling.best_of is None:
            assert all(len(piece.tokens) <= 1 for piece in client.pieces)
    return [client.answers() for client in clients], engine


def comparable(answers: list[list[Output]]) -> list[list[Output]]:
    """The answers without what depends on when a request starts: times, and numbers of shared tokens."""
    return [[answer._replace(admitted=None, shared=0) for answer in request] for request in answers]


@pytest.mark.parametrize("few", [True, False], ids=["few blocks", "many blocks"])
@pytest.mark.parametrize("seed", range(3))
def test_random_loads_have_the_answers_of_steps_without_drafts(seed: int, few: bool) -> None:
    """The device checks that all rows, and those that share their blocks, read their own tokens."""
    draw = random.Random(seed)
    size = draw.choice([1, 2, 4, 8])
    sizes = {"rows": draw.randint(4, 8), "block": size, "blocks": (104 if few else 800) // size}
    sizes["replicas"] = 1 if few else 2
    before, after = (
        answers(Repeating(drafts=drafts, vocabulary=257, length=100, **sizes), seed)
        for drafts in (0, draw.choice([1, 4, 7]))
    )
    assert comparable(after[0]) == comparable(before[0])
    plain, drafted = (engine.statistics() for _, engine in (before, after))
    assert plain.drafted_tokens_total == plain.accepted_tokens_total == 0
    assert 0 < drafted.accepted_tokens_total < drafted.drafted_tokens_total
    assert drafted.steps_total < plain.steps_total and drafted.tokens_total == plain.tokens_total
    assert drafted.shared_tokens_total > 0
    assert not few or drafted.preemptions_total > 0
    assert sum(drafted.accepted_at_total) == drafted.accepted_tokens_total
    assert list(drafted.accepted_at_total) == sorted(drafted.accepted_at_total, reverse=True)
    assert drafted.accepted_at_total[0] <= drafted.drafts_total <= drafted.drafted_tokens_total
    values = {name: value(drafted) for name, (_, value) in VLLM_STATISTICS.items()}
    assert values["spec_decode_num_draft_tokens_total"] == drafted.drafted_tokens_total
    assert values["spec_decode_num_accepted_tokens_total"] == drafted.accepted_tokens_total


def test_metrics_of_a_server() -> None:
    """Accepted tokens by their position; nothing of the kind without drafts."""
    for drafts in (0, 2):
        engine, client = Engine(Repeating(drafts=drafts, vocabulary=257)), Client([97] * 8, max_tokens=30)
        serve(engine, client)
        samples = [sample for metric in Readiness("m", Worker(engine)).collect() for sample in metric.samples]
        counts = engine.statistics().accepted_at_total
        assert len(counts) == drafts and all(counts)
        for name, label in (
            ("megajax_accepted_at_total", "model"),
            ("vllm:spec_decode_num_accepted_tokens_per_pos_total", "model_name"),
        ):
            assert [(sample.labels, sample.value) for sample in samples if sample.name == name] == [
                ({label: "m", "position": str(position)}, count) for position, count in enumerate(counts)
            ]


def test_statistics_at_a_terminal() -> None:
    for drafts, counted in ((0, False), (4, True)):
        device = Repeating(drafts=drafts, vocabulary=257, length=256)
        generator, _ = session(Sampling(max_tokens=50, temperature=0, ignore_eos=True), device)
        generator.answer("abc")
        assert bool(re.search(r"\n[1-9]\d* of \d+ drafted tokens accepted\n", generator.statistics())) == counted


class Faulty(Repeating):
    """The first request has nonfinite logits after 30 tokens."""

    def _sampled(self, row: Sequence, first: int, count: int, ahead: int) -> Sampled:
        result = super()._sampled(row, first, count, ahead)
        faulty = row.order[0] == 0 and first + count + ahead == 30
        return result._replace(token=-1, finite=False) if faulty else result


def test_a_fault_in_a_draft_ends_its_answer_where_it_would_end_without() -> None:
    def run(drafts: int) -> tuple[list[Output], Engine]:
        engine, clients = (
            Engine(Faulty(drafts=drafts, vocabulary=257)),
            [Client([97] * 4, max_tokens=50), Client([98] * 4, max_tokens=50)],
        )
        serve(engine, *clients)
        return [client.answer._replace(admitted=None) for client in clients], engine

    (plain, _), (drafted, engine) = run(0), run(4)
    assert plain == drafted and engine.statistics().errors_total == 1
    assert [(len(answer.tokens), answer.finish) for answer in drafted] == [(26, "error"), (50, "length")]


def test_a_draft_leaves_a_block_for_each_running_row() -> None:
    """It has the tokens that fit into the blocks of its row until more blocks than that are free."""

    def drafts(blocks: int) -> list[int]:
        scheduler = Scheduler(BlockPool(blocks, 2), rows=2, chunk=8, tile=4)
        rows = [Sequence(order=(number, 0), tokens=[9, number], limit=9) for number in (0, 1)]
        for row in rows:
            row.drafter = Known([row.order[0]] * 9, wrong=0)
            scheduler.add(row)
        scheduler.next()
        for row in rows:
            row.tokens.append(3)
        scheduler.next()
        check(scheduler)
        return [len(row.draft) for row in rows]

    assert drafts(5) == [1, 1] and drafts(6) == [3, 1] and drafts(7) == [4, 1] and drafts(20) == [4, 4]


def test_rows_whose_next_token_depends_on_more_get_no_drafts() -> None:
    """Constraints, forbidden sequences and beams need the tokens before."""
    engine = Engine(Repeating(drafts=4, vocabulary=257), AnswerRules(guide=lambda guide: at_once(Anything())))
    guided, forbidding, beams = (
        Client([97] * 8, guide={}, max_tokens=20, ignore_eos=False),
        Client([97] * 8, bad_tokens=((5, 6),), max_tokens=20),
        Client([97] * 8, beams=2, max_tokens=20),
    )
    serve(engine, guided, forbidding, beams)
    assert engine.statistics().drafted_tokens_total == 0 and len(guided.answer.tokens) == 20


class Anything:
    """A constraint that allows all tokens."""

    def after(self, token: int) -> "Anything":
        del token
        return self


LLAMA = decoder(replace(HEADS, rope=ROPE))


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("window, sinks, gate", {}),
        *(pytest.param(name, {}, marks=pytest.mark.slow) for name in ("latent", "mamba 1", "delta net")),
        pytest.param("nemotron-h", {"tensor": 4}, marks=pytest.mark.slow),
    ],
)
def test_logits_after_the_tokens_of_drafts(name: str, sizes: dict[str, int]) -> None:
    """They are those of a forward pass, whatever wrong drafts of earlier steps left in blocks and states."""
    model, draw = loaded(MODELS[name], sizes), np.random.default_rng(3)
    tokens = draw.integers(0, VOCABULARY, (3, LENGTH)).astype(np.int32)
    expected = whole_logits(model, tokens)
    # With states of rows, a step computes one prompt.
    tile = 4 if all(leaf.per == "token" for leaf in MODELS[name].cache_leaves(1)) else 8
    programs = programs_of(model, [Logits()], chunks=(0, 8), tile=tile, drafts=3, blocks=24)
    blocks, at, compared = draw.permutation(24).reshape(3, -1), [8, 5, 0], 0
    rows = [Row(row.tolist(), blocks[number].tolist(), number) for number, row in enumerate(tokens)]

    def run(step: Step) -> np.ndarray:
        return np.asarray(programs.choose(programs.start([step]), Logits(), ()).logits)[:, :VOCABULARY]

    run(Step(prompts=[(rows[0], 0, 8)]))
    run(Step(prompts=[(rows[1], 0, 5)]))
    while max(at) < LENGTH - 4:
        right = draw.integers(0, 4, 2).tolist()
        for row, first, count in zip(rows[:2], at[:2], right, strict=True):
            row.draft = [*row.tokens[first + 1 : first + 1 + count], *[7] * (3 - count)][: draw.integers(count, 4)]
        # The other prompt joins them in three steps.
        prompts = [(rows[2], at[2], 5)] if at[2] < 15 else []
        logits = run(Step(list(zip(rows[:2], at[:2], strict=True)), prompts))
        places = [
            (4 * number + ahead, number, at[number] + ahead) for number in (0, 1) for ahead in range(right[number] + 1)
        ]
        places += [(4 * 2, 2, at[2] + 4)] if prompts else []
        for choice, number, position in places:
            np.testing.assert_allclose(logits[choice], expected[number, position], atol=1e-5 * np.abs(expected).max())
        at = [at[0] + right[0] + 1, at[1] + right[1] + 1, at[2] + 5 * len(prompts)]
        compared += len(places)
    assert compared > 20 and at[2] == 15


SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.8, "seed": 1, "n": 2},
    {"temperature": 1, "top_p": 0.9, "seed": 2, "logprobs": 2},
    {"repetition_penalty": 1.4, "frequency_penalty": 0.5, "logprobs": 1},
    {"min_tokens": 20, "stop_tokens": tuple(range(3, 60)), "logit_bias": {9: 1.0}},
    {"temperature": 1.2, "seed": 5, "presence_penalty": 2},
)
"""For all programs, with penalties that count the tokens of drafts."""


HYBRID = decoder(MAMBA, replace(HEADS, rope=ROPE))
"""With states of rows, a part of which is kept for prompts that begin alike."""


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((LLAMA, {}, 4, 0), id="one"),
        pytest.param((HYBRID, {"data": 2, "tensor": 2}, 8, 2), id="states of replicas", marks=pytest.mark.slow),
    ],
)
def devices(request: pytest.FixtureRequest) -> tuple[ModelDevice, ModelDevice]:
    """Devices without and with drafts, with all programs compiled."""
    cfg, sizes, tile, snapshots = request.param
    model, made = loaded(replace(cfg, sequence_length=64), sizes), []
    shapes: Any = {"chunks": (0, 8), "tile": tile, "blocks": 24, "length": 64, "rows": 3, "snapshots": snapshots}
    for drafts in (0, 4):
        programs = programs_of(model, choosers(VOCABULARY), drafts=drafts, **shapes)
        assert len(list(programs.compile())) == programs.count == 5 + (snapshots > 0)
        made.append(ModelDevice(programs, VOCABULARY))
    return made[0], made[1]


def test_a_model_gives_the_tokens_and_scores_of_steps_without_drafts(devices: Any, compiled: list[str]) -> None:
    """There are few blocks and shared prefixes, and nothing is compiled."""
    draw, runs = random.Random(4), []
    heads = [[draw.randrange(VOCABULARY) for _ in range(5)] * 3 for _ in range(2)]
    prompts = [([*heads[number % 2], number], kind) for number, kind in enumerate(SETTINGS * 2)]
    compiled.clear()
    for device in devices:
        clients, engine = [Client(prompt, max_tokens=40, **kind) for prompt, kind in prompts], Engine(device)
        for client in clients:
            engine.submit(client.request)
        waiting = [sequence for scheduler in engine.schedulers for sequence in scheduler.waiting]
        for sequence in waiting if runs else ():
            number, choice = sequence.order
            tokens = *prompts[number][0], *runs[0][0][number].answers()[choice].tokens
            sequence.drafter = Known(tokens, wrong=0.2)
        serve(engine)
        runs.append((clients, engine.statistics()))
    assert compiled == []
    (plain, before), (drafted, after) = runs
    demand_equal(plain, drafted, atol=1e-4)
    assert after.preemptions_total > 0 and after.shared_tokens_total > 0
    assert after.accepted_tokens_total > 200 and after.steps_total < 0.7 * before.steps_total


def test_latest_inputs_are_much_smaller_than_states() -> None:
    """Those of the layers of Bamba 9B are 4 % of a state; a state for each token of a draft would be 400 %."""
    mixer = Mamba2Config(heads=128, head_dim=64, state=128, groups=1)
    state = mixer.cache_leaves(4096, 1)[-1].size
    assert sum(leaf.size for leaf in latest_leaves(mixer, 4096, 1, drafts=4)) < 0.042 * state
    assert latest_leaves(mixer, 4096, 1, drafts=0) == latest_leaves(HEADS, 4096, 1, drafts=4) == []


def test_layers_whose_state_cannot_go_back_are_refused() -> None:
    class Custom:
        def cache_leaves(self, hidden: int, tensor: int) -> tuple[CacheLeaf, ...]:
            return (CacheLeaf("state", (hidden,), (None,), per="row"),)

    with user_error("inference.speculate"):
        latest_leaves(Custom(), 32, 1, drafts=2)


def test_the_setting_is_the_length_of_a_draft() -> None:
    config = InferenceConfig(speculate=3, compute="float32", rows=2)
    engine = make_engine(loaded(LLAMA, {}), config, TEXT, end_tokens=(), length=LENGTH, queue=1)
    assert engine.device.drafts == 3
    assert [problem.setting for problem in problems_of(InferenceConfig(speculate=-1))] == ["speculate"]
