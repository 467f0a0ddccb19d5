"""Requests through the engine on a device without a model: answers, ends, errors, counts."""

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from itertools import count
from typing import Any

import numpy as np
import pytest
from stand_in import StandIn, at_once, check, expected, hashed
from user_errors import user_error

from megajax.config.errors import UserError
from megajax.inference.admission import AnswerRules, seed_of
from megajax.inference.engine import Engine
from megajax.inference.request import Output, RefusedRequest, Request
from megajax.inference.request import Sequence as Row
from megajax.inference.sampling_settings import Sampling
from megajax.tokenizers.config import ByteTokenizerConfig

NAMES = count()


class Client:
    """A request, its outputs, and their sum."""

    def __init__(self, prompt: Sequence[int], *, priority: int = 0, cache_salt: bytes = b"", **settings: Any):
        settings = {"temperature": 0, "ignore_eos": True, **settings}
        self.pieces: list[Output] = []
        name = f"client {next(NAMES)}"
        sampling = Sampling(**settings)
        self.request = Request(
            identifier=name,
            prompt=tuple(prompt),
            sampling=sampling,
            deliver=self.pieces.append,
            priority=priority,
            cache_salt=cache_salt,
        )

    def answers(self) -> list[Output]:
        answers = [Output(choice) for choice in range(self.request.sampling.n)]
        for piece in self.pieces:
            assert answers[piece.choice].finish is None, "a piece after the end"
            answers[piece.choice] = answers[piece.choice].merge(piece)
        return answers

    @property
    def answer(self) -> Output:
        (answer,) = self.answers()
        return answer


def serve(engine: Engine, *clients: Client, steps: int = 5000) -> None:
    for client in clients:
        engine.submit(client.request)
    for _ in range(steps):
        if not engine.step():
            break
        for scheduler in engine.schedulers:
            check(scheduler)
    idle(engine)


def idle(engine: Engine) -> None:
    statistics = engine.statistics()
    assert (statistics.requests, statistics.running, statistics.waiting, statistics.blocks_used) == (0, 0, 0, 0)


def demand_equal(found: Iterable[Client], expected: Iterable[Client], atol: float = 1e-5) -> None:
    """Asserts answers with equal tokens and ends, and scores with equal tokens and ranks."""
    for client, wanted in zip(found, expected, strict=True):
        for answer, other in zip(client.answers(), wanted.answers(), strict=True):
            assert (answer.tokens, answer.finish) == (other.tokens, other.finish)
            scores, others = ([*each.scores, *each.prompt_scores[1:]] for each in (answer, other))
            for score, same in zip(scores, others, strict=True):
                assert score is not None and same is not None
                assert (score.token, score.rank) == (same.token, same.rank)
                assert [token for token, _ in score.top] == [token for token, _ in same.top]
                np.testing.assert_allclose(score.logprob, same.logprob, rtol=0, atol=atol)


def demand_refused(
    engine: Engine, client: Client, field: str | None, reason: str = "invalid", match: str | None = None
) -> None:
    """Asserts that an engine refuses a request, for this reason and field, in a message that matches."""
    with pytest.raises(RefusedRequest, match=match) as refused:
        engine.submit(client.request)
    assert (refused.value.reason, refused.value.field) == (reason, field)


def byte_engine(**settings: Any) -> Engine:
    return Engine(StandIn(vocabulary=257, **settings), AnswerRules(tokenizer=ByteTokenizerConfig().build()))


def test_tokens_come_one_by_one_until_max_tokens() -> None:
    client = Client([1, 2, 3], max_tokens=5)
    serve(Engine(StandIn()), client)
    assert [piece.tokens for piece in client.pieces] == [(token,) for token in expected([1, 2, 3], 5)]
    assert [piece.finish for piece in client.pieces] == [None] * 4 + ["length"]


def test_max_tokens_is_limited_to_the_longest_row_and_to_the_pool() -> None:
    client = Client([1] * 60, max_tokens=50)
    serve(Engine(StandIn(length=64)), client)
    assert len(client.answer.tokens) == 4 and client.answer.finish == "length"
    client = Client([1] * 30, max_tokens=50)
    serve(Engine(StandIn(blocks=9)), client)
    assert len(client.answer.tokens) == 6


@pytest.mark.parametrize(
    ("busy", "chosen"),
    [
        pytest.param((0, 0), 1, id="free"),
        pytest.param((0, 2), 1, id="busier by a quarter of the rows"),
        pytest.param((0, 3), 0, id="busier by more"),
        pytest.param((6, 8), 0, id="no free row"),
        pytest.param((8, 8), 1, id="no free row anywhere"),
        pytest.param((8, 9), 0, id="a longer queue"),
    ],
)
def test_a_request_goes_to_the_replica_that_knows_its_prompt(busy: tuple[int, int], chosen: int) -> None:
    engine, prompt = Engine(StandIn(rows=8, replicas=2, block=4)), [number % 7 for number in range(21)]
    first, second = engine.schedulers
    engine.submit(Client([1], max_tokens=9).request)
    serve(engine, Client(prompt, max_tokens=2))
    assert (first.shared_tokens, second.prompt_tokens) == (0, 21), "the second replica was the least busy one"
    for scheduler, rows in zip((first, second), busy, strict=True):
        scheduler.running += [Row(order=(-1, number), tokens=[1], limit=2) for number in range(rows)]
    engine.submit(Client(prompt).request)
    assert [first.load - busy[0], second.load - busy[1]] == [1 - chosen, chosen]


def test_end_of_text_and_stop_tokens() -> None:
    tokens = expected([7], 10)
    for settings in ({"stop_tokens": (tokens[4],)}, {"ignore_eos": False}):
        client = Client([7], max_tokens=10, **settings)
        serve(Engine(StandIn(), AnswerRules(end_tokens=(tokens[4],))), client)
        assert client.answer.tokens == tuple(tokens[:5]) and client.answer.finish == "stop"
    client = Client([7], max_tokens=10)
    serve(Engine(StandIn(), AnswerRules(end_tokens=(tokens[4],))), client)
    assert client.answer.tokens == tuple(tokens) and client.answer.finish == "length"


def test_the_token_that_ends_a_text_has_no_text() -> None:
    engine = byte_engine()
    client = Client(b"abc", max_tokens=3)
    serve(engine, client)
    last = client.answer.tokens[2]
    unstopped = Client(b"abc", max_tokens=9, stop_tokens=(last,))
    serve(engine, unstopped)
    assert unstopped.answer.tokens == client.answer.tokens
    assert unstopped.answer.text == bytes(client.answer.tokens[:2]).decode(errors="replace")


def test_min_tokens_excludes_tokens_that_would_end_the_answer() -> None:
    tokens = expected([7], 10)
    client = Client([7], max_tokens=12, min_tokens=6, stop_tokens=(tokens[1], tokens[4]))
    serve(Engine(StandIn()), client)
    answer = client.answer
    assert len(answer.tokens) >= 6 and not set(answer.tokens[:6]) & {tokens[1], tokens[4]}


def test_stop_strings_end_the_text_before_them() -> None:
    reference = Client(b"ab", max_tokens=40)
    serve(byte_engine(), reference)
    text = reference.answer.text
    stop = text[12:15]
    client = Client(b"ab", max_tokens=40, stop=(stop,))
    serve(byte_engine(), client)
    assert client.answer.text == text[: text.index(stop)] and client.answer.finish == "stop"
    delayed = Client(b"ab", max_tokens=40, min_tokens=39, stop=(stop,))
    serve(byte_engine(), delayed)
    assert delayed.answer.text == text


def test_seeds() -> None:
    """The seed of a request gives the same answer again, with any other requests; each choice has its own."""

    def answers(seed: int | None, engine_seed: int = 5, beside: int = 0, n: int = 3) -> list[tuple[int, ...]]:
        client = Client([1, 2], max_tokens=8, temperature=1, seed=seed, n=n)
        clients = [Client([9, number], max_tokens=8, temperature=1) for number in range(beside)]
        serve(Engine(StandIn(), AnswerRules(seed=engine_seed)), *clients, client)
        return [tuple(answer.tokens) for answer in client.answers()]

    assert answers(11) == answers(11, engine_seed=6, beside=5)
    assert answers(11) == [tuple(expected([1, 2], 8, seed=seed_of(11, choice))) for choice in range(3)]
    assert len(set(answers(11))) == 3
    assert answers(11, n=1) == answers(11)[:1]
    assert answers(None) == answers(None) != answers(None, engine_seed=6)


def test_requests_share_the_cache_with_those_of_their_salt() -> None:
    engine, shared = Engine(StandIn(block=4)), []
    for salt in (b"", b"a", b"b", b"a", b"", b"ab"):
        client = Client([1] * 9, max_tokens=2, cache_salt=salt)
        serve(engine, client)
        shared.append(client.answer.shared)
    assert shared == [0, 0, 0, 8, 8, 0]


def test_a_request_of_lower_priority_value_runs_before_earlier_ones() -> None:
    engine, ended = Engine(StandIn(rows=1)), []
    clients = [Client([1, number], max_tokens=3, priority=priority) for number, priority in enumerate((0, 0, -1))]
    for client in clients:
        engine.submit(client.request)
    while engine.step():
        ended += [client for client in clients if client.answer.finish and client not in ended]
    assert ended == [clients[2], clients[0], clients[1]]
    with user_error(kind=RefusedRequest):
        engine.submit(Client([1], priority="high").request)  # type: ignore[arg-type]


def test_many_more_answers_than_rows() -> None:
    """One place in the queue; the whole blocks of the prompt are computed once, and each answer has its own seed."""
    device, prompt = StandIn(rows=8, chunk=32, tile=4, block=4, blocks=256), [number % 7 for number in range(22)]
    engine = Engine(device, queue=0)
    client = Client(prompt, n=300, max_tokens=3, temperature=1, seed=1)
    engine.submit(client.request)
    assert engine.requests == 1 and engine.capacity == 8
    serve(engine)
    answers = client.answers()
    assert len({answer.tokens for answer in answers}) > 150
    for choice in (0, 150, 299):
        assert list(answers[choice].tokens) == expected(prompt, 3, seed=seed_of(1, choice))
    # 5 of 5.5 blocks are shared.
    assert engine.statistics().prompt_tokens_total == 22 + 299 * 2
    best = Client(prompt, n=2, best_of=300, max_tokens=3, temperature=1, seed=1)
    serve(engine, best)
    assert [answer.finish for answer in best.answers()] == ["length"] * 2


def test_the_best_of_several_comes_at_the_end() -> None:
    class Scored(StandIn):
        """Odd tokens are likely."""

        def chosen(self, written: Any) -> Any:
            return [
                [result._replace(logprob=-0.1 if result.token % 2 else -3.0) for result in replica]
                for replica in super().chosen(written)
            ]

    client = Client([1, 2], max_tokens=6, temperature=1, seed=3, n=2, best_of=5, logprobs=1)
    serve(Engine(Scored()), client)
    every = [expected([1, 2], 6, seed=seed_of(3, choice)) for choice in range(5)]
    best = sorted(every, key=lambda tokens: -sum(token % 2 for token in tokens))
    odd = [sum(token % 2 for token in answer.tokens) for answer in client.answers()]
    assert odd == [sum(token % 2 for token in tokens) for tokens in best[:2]]
    assert len(client.pieces) == 2 and len(client.pieces[0].scores) == 6


def test_the_best_of_aborted_answers_have_tokens() -> None:
    client = Client([1, 2], max_tokens=20, temperature=1, seed=3, n=2, best_of=6)
    engine = Engine(StandIn(rows=2))
    engine.submit(client.request)
    for _ in range(6):
        engine.step()
    engine.abort_all()
    assert [(answer.finish, len(answer.tokens) > 0) for answer in client.answers()] == [("abort", True)] * 2


@pytest.mark.parametrize("blocks", [64, 13])
def test_scores_of_the_prompt_are_complete_and_come_first(blocks: int) -> None:
    """The prompt may be in the cache, and the row may be preempted within its prompt."""
    engine = Engine(StandIn(blocks=blocks))
    prompt = list(range(40))
    serve(engine, Client(prompt, max_tokens=2))
    clients = [Client(prompt, max_tokens=4, prompt_logprobs=0, n=2) for _ in range(2)]
    serve(engine, *clients)
    for client in clients:
        scores = client.answers()[0].prompt_scores
        assert scores[0] is None and [score.token for score in scores[1:] if score] == prompt[1:]
        assert [score.logprob for score in scores[1:] if score] == [-at / 8 for at in range(1, 40)]
        assert client.answers()[1].prompt_scores == ()
        assert next(piece for piece in client.pieces if piece.choice == 0).prompt_scores


@pytest.mark.parametrize(
    ("prompt", "settings", "reason", "field"),
    [
        ([1] * 64, {}, "too_long", "prompt"),
        ([1] * 65, {"max_tokens": 0}, "too_long", "prompt"),
        ([], {}, "invalid", "prompt"),
        ([50], {}, "invalid", "prompt"),
        ([-1], {}, "invalid", "prompt"),
        ([True], {}, "invalid", "prompt"),
        ([1], {"top_p": 0}, "invalid", "top_p"),
        ([1], {"stop_tokens": (50,)}, "invalid", "stop_tokens"),
        ([1], {"logit_bias": {50: 1}}, "invalid", "logit_bias"),
        ([1], {"stop": ("a",)}, "invalid", "stop"),
        ([1], {"guide": {}, "ignore_eos": False}, "invalid", "guide"),
    ],
)
def test_impossible_requests_are_refused(prompt: list[int], settings: dict[str, Any], reason: str, field: str) -> None:
    engine = Engine(StandIn(length=64))
    demand_refused(engine, Client(prompt, **settings), field, reason)
    idle(engine)
    serve(engine, Client([1] * 63, max_tokens=5), Client([1] * 63, max_tokens=5))


def test_more_candidates_than_the_device_returns_are_refused() -> None:
    device = StandIn()
    device.top = 8
    serve(Engine(device), Client([1], beams=4))
    words = "need 12 candidates of each beam; the device gives 8"
    demand_refused(Engine(device), Client([1], beams=4, stop_tokens=(1, 2)), "beams", match=words)


@pytest.mark.parametrize(
    ("longest", "text", "reason"),
    [(0, (1,), "invalid"), (4, (), "invalid"), (4, (50,), "invalid"), (4, (1,) * 5, "too_long")],
)
def test_texts_that_cannot_be_encoded_are_refused(longest: int, text: tuple[int, ...], reason: str) -> None:
    engine, client = Engine(StandIn(memory=longest, prefix_sharing=False)), Client([1])
    client.request.memory = text
    demand_refused(engine, client, "memory", reason)
    client.request.memory = (1,) * longest
    serve(engine, client)


class ThreeTokens:
    """A constraint that allows three tokens."""

    def __init__(self, extra: int = 0):
        self.made = extra

    def after(self, token: int) -> "ThreeTokens":
        if self.made == 3:
            raise ValueError("no fourth token")
        return ThreeTokens(self.made + 1)


def test_constraints_are_built_once_for_a_row_and_follow_its_tokens() -> None:
    def guide(value: Any) -> Future[ThreeTokens]:
        if value != "good":
            raise UserError(f"{value!r} is no constraint")
        return at_once(ThreeTokens())

    engine = Engine(StandIn(), AnswerRules(guide=guide))
    unaffected = [
        Client([1], max_tokens=3, guide="good", n=2, ignore_eos=False),
        Client([1], max_tokens=4, guide="good", ignore_eos=False),
    ]
    serve(engine, *unaffected)
    assert [answer.finish for client in unaffected for answer in client.answers()] == ["length", "length", "error"]
    demand_refused(engine, Client([1], guide="bad", ignore_eos=False), "guide", match="'bad' is no constraint")
    demand_refused(engine, Client([1], guide="good", beams=2, ignore_eos=False), "guide")


def test_too_many_requests_and_identifiers_in_use_are_refused() -> None:
    engine = Engine(StandIn(rows=2), queue=3)
    clients = [Client([number], max_tokens=4) for number in range(6)]
    for client in clients[:5]:
        engine.submit(client.request)
    demand_refused(engine, clients[5], None, "queue_full")
    demand_refused(engine, clients[0], "identifier", match="in use")
    serve(engine)
    serve(engine, clients[5])


def test_cancelled_requests_free_their_blocks_at_once() -> None:
    engine = Engine(StandIn(rows=2))
    clients = [Client([number] * 9, max_tokens=30, n=2, beams=1 + number % 3) for number in range(4)]
    for client in clients:
        engine.submit(client.request)
    for _ in range(8):
        engine.step()
    for client in clients:
        engine.cancel(client.request.identifier)
        engine.cancel(client.request.identifier)
    idle(engine)
    assert [answer.finish for client in clients for answer in client.answers()] == ["cancelled"] * 8
    serve(engine, Client([1], max_tokens=3))


def test_a_row_with_bad_logits_ends_alone() -> None:
    engine = Engine(StandIn(bad=(13,)))
    unaffected, failing = Client([1, 2, 3], max_tokens=12), Client([1, 13], max_tokens=5, n=2)
    serve(engine, unaffected, failing)
    assert [answer.finish for answer in failing.answers()] == ["error", "error"]
    assert all(answer.text == "" and answer.tokens == () for answer in failing.answers())
    assert unaffected.answer.tokens == tuple(expected([1, 2, 3], 12))
    assert engine.statistics().errors_total == 2 and not engine.failed and engine.finite
    serve(engine, Client([13]))
    assert not engine.finite, "no row of the last step was finite"


def test_an_error_of_one_request_ends_no_other() -> None:
    class Broken(Client):
        def __init__(self, after: int, **settings: Any):
            super().__init__([5, 6], max_tokens=9, **settings)
            self.request.deliver = self.deliver
            self.after = after

        def deliver(self, piece: Output) -> None:
            self.pieces.append(piece)
            if len(self.pieces) > self.after:
                raise OSError("gone")

    engine = Engine(StandIn())
    unaffected = Client([1, 2, 3], max_tokens=12)
    broken = [Broken(0), Broken(3), Broken(3, n=2), Broken(0, beams=2), Broken(0, n=1, best_of=3, temperature=1)]
    serve(engine, *broken, unaffected)
    assert unaffected.answer.tokens == tuple(expected([1, 2, 3], 12))
    assert engine.statistics().errors_total == len(broken)


def test_text_that_cannot_be_decoded_is_an_error_of_its_request() -> None:
    engine = Engine(StandIn(vocabulary=300), AnswerRules(tokenizer=ByteTokenizerConfig().build()))
    clients = [Client([number], max_tokens=5) for number in range(30)]
    serve(engine, *clients)
    finishes = {client.answer.finish for client in clients}
    assert finishes == {"error", "length"}
    for client in clients:
        tokens = expected(client.request.prompt, 5, 300)
        outside = next((place for place, token in enumerate(tokens) if token > 256), 5)
        assert client.answer.tokens == tuple(tokens[:outside])
        assert client.answer.finish == ("length" if outside == 5 else "error")


def test_an_error_of_the_device_ends_everything() -> None:
    class Failing(StandIn):
        def start(self, work: Any) -> Any:
            if self.steps == 3:
                raise RuntimeError("device lost")
            return super().start(work)

    engine = Engine(Failing())
    clients = [Client([number], max_tokens=9) for number in range(3)]
    with pytest.raises(RuntimeError, match="device lost"):
        serve(engine, *clients)
    assert [client.answer.finish for client in clients] == ["error"] * 3
    idle(engine)
    with user_error(kind=RefusedRequest):
        engine.submit(Client([1]).request)


def beams_of(prompt: Sequence[int], beams: int, length: int, end_tokens: Sequence[int] = ()) -> list[tuple[int, ...]]:
    """The best beams, found by extending whole sequences without rows and blocks. Scores are those of `StandIn`."""
    device, running, finished = StandIn(), [((), 0.0)], []
    for extra in range(1, length + 1):
        options = []
        for tokens, logprob in running:
            first = hashed([*prompt, *tokens], device.vocabulary)
            for place in range(max(2, 1 + len(end_tokens)) * beams):
                options.append(((*tokens, (first + place) % device.vocabulary), logprob - 0.5 - place / 8))
        options = sorted(options, key=lambda option: -option[1])[: max(2, 1 + len(end_tokens)) * beams]
        ended = [option for option in options[:beams] if option[0][-1] in end_tokens or extra == length]
        finished = sorted([*finished, *((t, s / len(t)) for t, s in ended)], key=lambda candidate: -candidate[1])[
            :beams
        ]
        running = [option for option in options if option[0][-1] not in end_tokens and extra < length][:beams]
        if not running or (len(finished) == beams and running[0][1] / extra <= finished[-1][1]):
            break
    return [tokens for tokens, _ in finished]


@pytest.mark.parametrize(
    ("blocks", "sharing"), [(64, True), (7, True), pytest.param(64, False, id="a model with a state per row")]
)
def test_beam_search_through_rows(blocks: int, sharing: bool) -> None:
    """Beams are copied, dropped and preempted while others run. In 7 blocks no two beams fit."""
    engine = Engine(StandIn(rows=3, blocks=blocks, prefix_sharing=sharing))
    prompt, unstopped = list(range(13)), Client([4, 5], max_tokens=9)
    client = Client(prompt, max_tokens=12, beams=4, n=3, logprobs=1)
    serve(engine, client, unstopped)
    assert [tuple(answer.tokens) for answer in client.answers()] == beams_of(prompt, 4, 12)[:3]
    assert list(unstopped.answer.tokens) == expected([4, 5], 9)
    assert (engine.statistics().shared_tokens_total > 0) == sharing
    for answer in client.answers():
        assert [score.token for score in answer.scores] == list(answer.tokens)
        for place, score in enumerate(answer.scores):
            first = hashed([*prompt, *answer.tokens[:place]], 50)
            assert score.top == ((first, -0.5),) and score.rank == (score.token - first) % 50 + 1
            assert score.logprob == -0.5 - (score.token - first) % 50 / 8


def test_beam_search_ends_at_ends_and_stop_strings() -> None:
    device = StandIn(vocabulary=257)
    engine = Engine(device, AnswerRules(tokenizer=ByteTokenizerConfig().build()))
    plain = Client(b"abcd", max_tokens=10, beams=3)
    serve(engine, plain)
    assert plain.answer.finish == "length" and len(plain.answer.tokens) == 10
    token = plain.answer.tokens[3]
    ended = Client(b"abcd", max_tokens=10, beams=3, stop_tokens=(token,))
    serve(engine, ended)
    assert ended.answer.finish == "stop" and ended.answer.tokens[-1] == token
    stop = plain.answer.text[2:4]
    stopped = Client(b"abcd", max_tokens=10, beams=3, stop=(stop,))
    serve(engine, stopped)
    assert stopped.answer.finish == "stop" and stopped.answer.text == plain.answer.text[: plain.answer.text.index(stop)]
