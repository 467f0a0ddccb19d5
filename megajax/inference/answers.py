"""The answers of a request during generation: results of the device become pieces of text.

`Answers` delivers the sampled tokens, `BestAnswers` keeps them until all answers have ended, and `BeamAnswers` runs a
beam search.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from megajax.inference.detokenizer import TextStream
from megajax.inference.device import Sampled
from megajax.inference.request import Answer, Finish, Piece, Request, TokenScore
from megajax.inference.sampling.beams import Beam, BeamSearch, Finished
from megajax.inference.scheduler import Row, Scheduler


class ActiveRequest:
    """An unfinished request.

    Attributes:
        prompt_scores: scores of the prompt tokens computed so far; None for the first token.
        tokens: number of tokens generated so far, in all answers.
        faults: number of faults of this request.
    """

    def __init__(self, request: Request, scheduler: Scheduler):
        self.request, self.scheduler, self.tokens, self.faults = request, scheduler, 0, 0
        self.prompt_scores: list[TokenScore | None] = [None]

    def rows(self) -> list[Row]:
        """The unfinished rows; empty when all answers were delivered."""
        raise NotImplementedError

    def unfinished(self) -> list[int]:
        """Numbers of the answers whose end was not delivered."""
        raise NotImplementedError

    def grow(self, row: Row, result: Sampled) -> None:
        """Choose the next token of a row that was computed up to its last token."""
        raise NotImplementedError

    def end(self, row: Row, finish: Finish) -> None:
        """End the row without another token."""
        raise NotImplementedError

    def receive(self, row: Row, computed: int, result: Sampled) -> None:
        """Handle a result of the device. computed: number of the row's tokens computed by the end of the step."""
        if row.unscored:
            last = min(computed + 1, row.prompt)
            self.prompt_scores[last - len(result.prompt) :] = result.prompt
            row.unscored = computed < row.prompt
        complete = computed == len(row.tokens)
        if not result.finite or (complete and result.token < 0):
            self.faults += 1
            self.end(row, "error")
        elif complete and len(row.tokens) >= row.limit:
            self.end(row, "length")
        elif complete:
            self.grow(row, result)

    def end_all(self, finish: Finish) -> None:
        """End all unfinished answers."""
        while rows := self.rows():
            self.end(rows[0], finish)

    def free(self) -> None:
        """Remove the rows of the request from the scheduler."""
        for row in self.rows():
            self.scheduler.remove(row)

    def fail(self) -> None:
        """End the request after an exception, in any state."""
        self.faults += 1
        self.free()
        for number in self.unfinished():
            self.request.deliver(Piece(number, "", (), (), "error"))

    def prompt_part(self, number: int) -> tuple[TokenScore | None, ...]:
        """The scores of the prompt, for the first piece of answer 0."""
        if number or self.request.sampling.prompt_logprobs is None:
            return ()
        scores, self.prompt_scores = tuple(self.prompt_scores), []
        return scores


@dataclass(eq=False)
class Choice:
    """An unfinished answer."""

    number: int
    row: Row
    text: TextStream
    logprob: float = 0.0
    """Sum of the log-probabilities of its tokens."""


class Answers(ActiveRequest):
    """Independent answers, delivered token by token."""

    def __init__(self, request: Request, rows: Sequence[Row], texts: Sequence[TextStream], scheduler: Scheduler):
        """rows and texts: one for each answer."""
        super().__init__(request, scheduler)
        numbered = enumerate(zip(rows, texts, strict=True))
        self._choices = {row: Choice(number, row, text) for number, (row, text) in numbered}
        for row in rows:
            scheduler.add(row)

    def rows(self) -> list[Row]:
        return list(self._choices)

    def unfinished(self) -> list[int]:
        return [choice.number for choice in self._choices.values()]

    def grow(self, row: Row, result: Sampled) -> None:
        choice, token, sampling = self._choices[row], result.token, row.sampling
        row.tokens.append(token)
        self.tokens += 1
        choice.logprob += result.logprob
        if row.guide is not None:
            row.guide = row.guide.after(token)
        if row.generated == max(1, sampling.min_tokens):
            choice.text.watch(sampling.stop)
        text = "" if token in row.end_tokens else choice.text.add(token)
        ended = token in row.end_tokens or choice.text.stopped or len(row.tokens) >= row.limit
        text += choice.text.end() if ended else ""
        # The end of the text may have completed a stop string.
        stopped = token in row.end_tokens or choice.text.stopped
        scores = () if sampling.logprobs is None else (score_of(token, result, sampling.logprobs),)
        self._deliver(choice, text, (token,), scores, "stop" if stopped else "length" if ended else None)

    def end(self, row: Row, finish: Finish) -> None:
        choice = self._choices[row]
        self._deliver(choice, choice.text.end(), (), (), finish)

    def _deliver(
        self, choice: Choice, text: str, tokens: tuple[int, ...], scores: tuple[TokenScore, ...], finish: Finish | None
    ) -> None:
        if finish is not None:
            self.scheduler.remove(choice.row)
            del self._choices[choice.row]
        self._send(choice, Piece(choice.number, text, tokens, scores, finish, self.prompt_part(choice.number)))

    def _send(self, choice: Choice, piece: Piece) -> None:
        self.request.deliver(piece)


class BestAnswers(Answers):
    """The n of `best_of` answers with the largest mean log-probability per token, delivered when all have ended."""

    def __init__(self, request: Request, rows: Sequence[Row], texts: Sequence[TextStream], scheduler: Scheduler):
        super().__init__(request, rows, texts, scheduler)
        self._answers = [Answer() for _ in rows]
        self._logprobs = [0.0 for _ in rows]

    def unfinished(self) -> list[int]:
        return list(range(self.request.sampling.n))

    def _send(self, choice: Choice, piece: Piece) -> None:
        self._answers[choice.number].add(piece)
        self._logprobs[choice.number] = choice.logprob / max(1, choice.row.generated)
        if not self._choices:
            deliver_best(self.request, self._ranked(), self._answers[0].prompt_scores)

    def _ranked(self) -> list[Answer]:
        """Answers by descending mean log-probability; those with a fault last."""

        def order(number: int) -> tuple[bool, float]:
            return self._answers[number].finish not in ("stop", "length"), -self._logprobs[number]

        return [self._answers[number] for number in sorted(range(len(self._answers)), key=order)]


class BeamAnswers(ActiveRequest):
    """A beam search; its answers are delivered at the end.

    Each running beam is a row. A computed beam waits until all beams are computed, in whatever order the scheduler
    runs them; then beams are extended, copied and dropped together.
    """

    def __init__(self, request: Request, row: Row, texts: Sequence[TextStream], scheduler: Scheduler):
        """texts: one for each answer."""
        super().__init__(request, scheduler)
        sampling, self._texts, self._copies = request.sampling, texts, 0
        limit, penalty = row.limit - row.prompt, sampling.length_penalty
        self._search = BeamSearch(beams=sampling.beams, limit=limit, end_tokens=row.end_tokens, length_penalty=penalty)
        row.top = max(self._search.candidate_count, sampling.logprobs or 0)
        self._beams, self._results = [row], dict[Row, Sampled]()
        self._scores: dict[tuple[int, ...], tuple[TokenScore, ...]] = {(): ()}
        scheduler.add(row)

    def rows(self) -> list[Row]:
        return list(self._beams)

    def unfinished(self) -> list[int]:
        return list(range(self.request.sampling.n))

    def grow(self, row: Row, result: Sampled) -> None:
        self._results[row], row.paused = result, True
        if len(self._results) == len(self._beams):
            self._advance()

    def end(self, row: Row, finish: Finish) -> None:
        """A fault of one beam ends the search."""
        self._finish([Answer(finish=finish)] * self.request.sampling.n)

    def _advance(self) -> None:
        parents, results = self._beams, [self._results[row] for row in self._beams]
        running = self._search.advance([result.top for result in results], parents[0].forbidden)
        if self.request.sampling.logprobs is not None:
            self._note_scores(parents, results, running)
        rows: list[Row] = []
        # Copies are made before their parents grow.
        for number, beam in enumerate(running):
            first = all(earlier_beam.parent != beam.parent for earlier_beam in running[:number])
            rows.append(parents[beam.parent] if first else self._copy(parents[beam.parent]))
        for row, beam in zip(rows, running, strict=True):
            row.tokens.append(beam.tokens[-1])
            row.paused = False
        for row in parents:
            if row not in rows:
                self.scheduler.remove(row)
        self._beams, self._results = rows, {}
        self.tokens += len(rows)
        if self._search.complete:
            best = self._search.best(len(self._texts))
            self._finish([self._answer(beam, text) for beam, text in zip(best, self._texts, strict=False)])

    def _copy(self, row: Row) -> Row:
        self._copies += 1
        return self.scheduler.fork(row, (row.order[0], self._copies))

    def _note_scores(self, parents: Sequence[Row], results: Sequence[Sampled], running: Sequence[Beam]) -> None:
        """Store the scores of the running and finished beams, by their tokens."""
        by_tokens = {tuple(row.tokens[row.prompt :]): result for row, result in zip(parents, results, strict=True)}
        scores = {}
        for tokens in [*(beam.tokens for beam in running), *(answer.tokens for answer in self._search.finished)]:
            if tokens in self._scores:
                scores[tokens] = self._scores[tokens]
                continue
            top = by_tokens[tokens[:-1]].top
            rank = next(place for place, (token, _) in enumerate(top) if token == tokens[-1])
            score = TokenScore(tokens[-1], top[rank][1], rank + 1, top[: self.request.sampling.logprobs])
            scores[tokens] = (*self._scores[tokens[:-1]], score)
        self._scores = scores

    def _answer(self, beam: Finished, text: TextStream) -> Answer:
        """The text of a beam, which ends before a stop string."""
        sampling, answer = self.request.sampling, Answer(finish="length")
        for number, token in enumerate(beam.tokens, start=1):
            if number == max(1, sampling.min_tokens):
                text.watch(sampling.stop)
            last = token in self._search.end_tokens
            answer.text += "" if last else text.add(token)
            answer.tokens = beam.tokens[:number]
            if last or text.stopped:
                answer.finish = "stop"
                break
        answer.text += text.end()
        answer.scores = self._scores.get(beam.tokens, ())[: len(answer.tokens)]
        return answer

    def _finish(self, answers: Sequence[Answer]) -> None:
        self.free()
        self._beams = []
        # With a vocabulary smaller than the number of beams, there may be fewer answers.
        lacking = self.request.sampling.n - len(answers)
        deliver_best(self.request, [*answers, *[Answer(finish="error")] * lacking], self.prompt_part(0))


def deliver_best(request: Request, answers: Sequence[Answer], prompt: tuple[TokenScore | None, ...]) -> None:
    """Deliver the first n answers, a piece each. prompt: scores of the prompt."""
    for number, answer in enumerate(answers[: request.sampling.n]):
        prompt_scores = prompt if number == 0 else ()
        request.deliver(Piece(number, answer.text, answer.tokens, answer.scores, answer.finish, prompt_scores))


def score_of(token: int, result: Sampled, count: int) -> TokenScore:
    """The score of the chosen token, with the `count` most likely tokens."""
    return TokenScore(token, result.logprob, result.rank, result.top[:count])


def seed_of(seed: int, choice: int) -> int:
    """The seed of an answer, from the seed of its request."""
    digest = blake2b(seed.to_bytes(8, "big") + choice.to_bytes(8, "big"), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
