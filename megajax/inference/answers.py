"""The answers of a request during generation: results of the device become outputs.

`Answers` delivers the sampled tokens, `BestAnswers` keeps them until all answers have ended, `BeamAnswers` runs a beam
search, and `Embedding` delivers the vector of a prompt in place of an answer.
"""

from collections import abc
from collections.abc import Callable
from typing import Any

import numpy as np

from megajax.inference.detokenizer import Detokenizer, TextStream
from megajax.inference.request import Finish, Output, Request, Sampled, Sequence, TokenScore
from megajax.inference.sampling.beams import Beam, BeamSearch, Finished
from megajax.inference.scheduler import Scheduler
from megajax.inference.statistics import EngineCounts


class ActiveRequest:
    """An unfinished request.

    Attributes:
        sequences: the unfinished ones; empty when all answers were delivered.
        tokens: number of tokens generated so far, in all answers.
        faults: number of faults of this request.
        experts: sequence -> its `Output.experts`.
    """

    experts: Callable[[Sequence], Any] | None = None

    def __init__(self, request: Request, sequences: abc.Sequence[Sequence], scheduler: Scheduler):
        self.request, self.scheduler, self.tokens, self.faults = request, scheduler, 0, 0
        self.sequences = list(sequences)
        self._open = set(range(request.sampling.n))
        self._prompt_scores: list[TokenScore | None] = [None]
        self._state_sum: Any = 0
        for sequence in sequences:
            scheduler.add(sequence)

    def grow(self, sequence: Sequence, result: Sampled) -> None:
        """Choose the next token of a sequence that was computed up to its last token."""
        raise NotImplementedError

    def end(self, sequence: Sequence, finish: Finish, problem: str = "") -> None:
        """End the sequence without another token. problem: as in `Output`."""
        raise NotImplementedError

    def receive(self, sequence: Sequence, computed: int, result: Sampled, counts: EngineCounts) -> None:
        """Handle the result of a sequence, and those after its draft as long as the draft has the tokens that were
        chosen: it gets the tokens of steps without drafts, one by one, and ends where it would end with these.

        computed: number of the sequence's tokens computed by the end of the step, without the draft.
        """
        draft = sequence.draft
        counts.drafts += bool(draft)
        counts.drafted += len(draft)
        self._receive(sequence, computed, result)
        for ahead, (token, following) in enumerate(zip(draft, result.following, strict=True)):
            if sequence not in self.sequences or sequence.tokens[computed + ahead] != token:
                break
            counts.accepted[ahead] += 1
            sequence.computed += 1
            self._receive(sequence, sequence.computed, following)

    def _receive(self, sequence: Sequence, computed: int, result: Sampled) -> None:
        if sequence.unscored:
            last = min(computed + 1, sequence.prompt)
            self._prompt_scores[last - len(result.prompt) :] = result.prompt
            sequence.unscored = computed < sequence.prompt
        if result.pooled is not None:
            # A preempted prompt is computed again from its first token on.
            self._state_sum = result.pooled.total + (self._state_sum if result.pooled.first else 0)
        complete = computed == len(sequence.tokens)
        if not result.finite or (complete and result.token < 0):
            self.faults += 1
            self.end(sequence, "error", _no_token(sequence) if result.finite else "")
        elif complete and len(sequence.tokens) >= sequence.limit:
            self.end(sequence, "length")
        elif complete:
            self.grow(sequence, result)

    def end_all(self, finish: Finish) -> None:
        """End all unfinished answers."""
        while self.sequences:
            self.end(self.sequences[0], finish)

    def free(self, *sequences: Sequence) -> None:
        """Remove sequences of the request from the scheduler."""
        for sequence in sequences:
            self.scheduler.remove(sequence)
            self.sequences.remove(sequence)

    def fail(self, problem: str = "") -> None:
        """End the request after an exception, in any state. problem: as in `Output`."""
        self.faults += 1
        self.free(*self.sequences)
        for number in sorted(self._open):
            self.send(Output(number, finish="error", problem=problem))

    def send(self, output: Output) -> None:
        """Deliver an output."""
        if output.finish is not None:
            self._open.discard(output.choice)
        self.request.deliver(output)

    def send_best(self, answers: abc.Sequence[Output], first: Output) -> None:
        """Deliver the first n answers, each as one output. first: what is known of the prompt, for answer 0."""
        for number, answer in enumerate(answers[: self.request.sampling.n]):
            scores, shared = ((), 0) if number else (first.prompt_scores, first.shared)
            admitted = first.admitted if answer.admitted is None else answer.admitted
            self.send(answer._replace(choice=number, prompt_scores=scores, shared=shared, admitted=admitted))

    def take_prompt_scores(self) -> tuple[TokenScore | None, ...]:
        """The scores of the prompt, if requested, for the first output of answer 0."""
        if self.request.sampling.prompt_logprobs is None:
            return ()
        scores, self._prompt_scores = tuple(self._prompt_scores), []
        return scores

    def take_start(self, sequence: Sequence) -> tuple[int, float | None]:
        """`Output.shared` and `Output.admitted` of the first output of a sequence."""
        shared, admitted, sequence.shared, sequence.admitted = sequence.shared, sequence.admitted, 0, None
        return 0 if sequence.order[1] else shared, admitted


class Answers(ActiveRequest):
    """Independent answers, delivered token by token."""

    def __init__(
        self, request: Request, sequences: abc.Sequence[Sequence], detokenizer: Detokenizer, scheduler: Scheduler
    ):
        """sequences: one for each answer."""
        super().__init__(request, sequences, scheduler)
        self._texts = {sequence: detokenizer.stream(request.text()) for sequence in sequences}

    def grow(self, sequence: Sequence, result: Sampled) -> None:
        text, token, sampling = self._texts[sequence], result.token, sequence.sampling
        sequence.tokens.append(token)
        self.tokens += 1
        sequence.logprob += result.logprob
        if sequence.guide is not None:
            sequence.guide = sequence.guide.after(token)
        if sequence.generated == max(1, sampling.min_tokens):
            text.watch(sampling.stop, keep=sampling.include_stop)
        new = "" if token in sequence.end_tokens else text.add(token)
        ended = token in sequence.end_tokens or text.stopped or len(sequence.tokens) >= sequence.limit
        new += text.end() if ended else ""
        # The end of the text may have completed a stop string.
        stopped = token in sequence.end_tokens or text.stopped
        scores = () if sampling.logprobs is None else (result.score(sampling.logprobs),)
        finish = "stop" if stopped else "length" if ended else None
        self._deliver(sequence, Output(sequence.order[1], new, (token,), scores, finish))

    def end(self, sequence: Sequence, finish: Finish, problem: str = "") -> None:
        self._deliver(sequence, Output(sequence.order[1], self._texts[sequence].end(), finish=finish, problem=problem))

    def _deliver(self, sequence: Sequence, output: Output) -> None:
        if output.finish is not None:
            if self.experts is not None and output.finish in ("stop", "length"):
                output = output._replace(experts=self.experts(sequence))
            self.free(sequence)
        scores = () if output.choice else self.take_prompt_scores()
        shared, admitted = self.take_start(sequence)
        self.collect(sequence, output._replace(prompt_scores=scores, shared=shared, admitted=admitted))

    def collect(self, sequence: Sequence, output: Output) -> None:
        """Handle an output of a sequence."""
        self.send(output)


class BestAnswers(Answers):
    """The n of `best_of` answers with the largest mean log-probability per token, delivered when all have ended."""

    def __init__(
        self, request: Request, sequences: abc.Sequence[Sequence], detokenizer: Detokenizer, scheduler: Scheduler
    ):
        super().__init__(request, sequences, detokenizer, scheduler)
        self._all = list(sequences)
        self._answers = [Output(number) for number in range(len(sequences))]

    def collect(self, sequence: Sequence, output: Output) -> None:
        self._answers[output.choice] = self._answers[output.choice].merge(output)
        if not self.sequences:
            self.send_best(sorted(self._answers, key=self._order), self._answers[0])

    def _order(self, answer: Output) -> tuple[bool, bool, float]:
        """Descending mean log-probability; answers with a fault last, and of aborted ones those without a token."""
        sequence = self._all[answer.choice]
        whole, generated = answer.finish in ("stop", "length"), sequence.generated
        return not whole, not whole and not generated, -sequence.logprob / max(1, generated)


class Embedding(ActiveRequest):
    """The embedding of a prompt, delivered when the whole prompt was computed: of one sequence, whose limit is its
    prompt."""

    def end(self, sequence: Sequence, finish: Finish, problem: str = "") -> None:
        embedding: tuple[float, ...] = ()
        if finish == "length":
            # The mean has the direction of the sum.
            norm = float(np.linalg.norm(self._state_sum))
            if 0 < norm < np.inf:
                embedding = tuple((self._state_sum / norm).tolist())
            else:
                self.faults, finish = self.faults + 1, "error"
        self.free(sequence)
        shared, admitted = self.take_start(sequence)
        output = Output(0, finish=finish, shared=shared, admitted=admitted, embedding=embedding, problem=problem)
        self.send(output)


class BeamAnswers(ActiveRequest):
    """A beam search; its answers are delivered at the end.

    Each running beam is a sequence. A computed beam waits until all beams are computed, in whatever order the scheduler
    runs them; then beams are extended, copied and dropped together.
    """

    def __init__(
        self, request: Request, sequences: abc.Sequence[Sequence], detokenizer: Detokenizer, scheduler: Scheduler
    ):
        """sequences: the first beam."""
        (first,), sampling = sequences, request.sampling
        self._first = first
        self._texts, self._copies = [detokenizer.stream(request.text()) for _ in range(sampling.n)], 0
        self._search = BeamSearch(
            beams=sampling.beams,
            limit=first.limit - first.prompt,
            end_tokens=first.end_tokens,
            length_penalty=sampling.length_penalty,
        )
        first.top = max(self._search.candidate_count, sampling.logprobs or 0)
        self._results: dict[Sequence, Sampled] = {}
        self._scores: dict[tuple[int, ...], tuple[TokenScore, ...]] = {(): ()}
        super().__init__(request, sequences, scheduler)

    def grow(self, sequence: Sequence, result: Sampled) -> None:
        self._results[sequence], sequence.paused = result, True
        if len(self._results) == len(self.sequences):
            self._advance()

    def end(self, sequence: Sequence, finish: Finish, problem: str = "") -> None:
        """A fault of one beam ends the search."""
        self._finish([Output(0, finish=finish, problem=problem)] * self.request.sampling.n)

    def _advance(self) -> None:
        parents, results = self.sequences, [self._results[sequence] for sequence in self.sequences]
        running = self._search.advance([result.top for result in results], parents[0].forbidden())
        if self.request.sampling.logprobs is not None:
            self._note_scores(parents, results, running)
        sequences: list[Sequence] = []
        # Copies are made before their parents grow.
        for number, beam in enumerate(running):
            first = all(earlier_beam.parent != beam.parent for earlier_beam in running[:number])
            sequences.append(parents[beam.parent] if first else self._copy(parents[beam.parent]))
        for sequence, beam in zip(sequences, running, strict=True):
            sequence.tokens.append(beam.tokens[-1])
            sequence.paused = False
        self.free(*(sequence for sequence in tuple(parents) if sequence not in sequences))
        self.sequences, self._results = sequences, {}
        self.tokens += len(sequences)
        if self._search.complete:
            best = self._search.best(len(self._texts))
            self._finish([self._answer(beam, text) for beam, text in zip(best, self._texts, strict=False)])

    def _copy(self, sequence: Sequence) -> Sequence:
        self._copies += 1
        return self.scheduler.fork(sequence, (sequence.order[0], self._copies))

    def _note_scores(
        self, parents: abc.Sequence[Sequence], results: abc.Sequence[Sampled], running: abc.Sequence[Beam]
    ) -> None:
        """Store the scores of the running and finished beams, by their tokens."""
        pairs = zip(parents, results, strict=True)
        by_tokens = {tuple(sequence.tokens[sequence.prompt :]): result for sequence, result in pairs}
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

    def _answer(self, beam: Finished, text: TextStream) -> Output:
        """The answer of a beam, whose text ends before a stop string."""
        sampling, new, tokens, finish = self.request.sampling, "", beam.tokens, "length"
        for number, token in enumerate(beam.tokens, start=1):
            if number == max(1, sampling.min_tokens):
                text.watch(sampling.stop, keep=sampling.include_stop)
            last = token in self._search.end_tokens
            new += "" if last else text.add(token)
            if last or text.stopped:
                tokens, finish = beam.tokens[:number], "stop"
                break
        return Output(0, new + text.end(), tokens, self._scores.get(beam.tokens, ())[: len(tokens)], finish)

    def _finish(self, answers: abc.Sequence[Output]) -> None:
        self.free(*self.sequences)
        # With a vocabulary smaller than the number of beams, there may be fewer answers.
        lacking = self.request.sampling.n - len(answers)
        failed = [Output(0, finish="error")] * lacking
        shared, admitted = self.take_start(self._first)
        first = Output(0, prompt_scores=self.take_prompt_scores(), shared=shared, admitted=admitted)
        self.send_best([*answers, *failed], first)


def _no_token(sequence: Sequence) -> str:
    """`Output.problem` of a sequence for which no token is allowed; empty if no setting excludes tokens."""
    sampling = sequence.sampling
    excluding = [name for name in ("guide", "allowed_tokens", "bad_tokens", "min_tokens") if getattr(sampling, name)]
    if not excluding:
        return ""
    return f"{excluding[0]} leaves no token to follow {sequence.generated} tokens of the answer: allow more tokens"


def answers_of(
    request: Request, sequences: abc.Sequence[Sequence], detokenizer: Detokenizer, scheduler: Scheduler
) -> ActiveRequest:
    """The answers of a request, whose sequences are queued."""
    if request.pooling:
        return Embedding(request, sequences, scheduler)
    if request.sampling.beams > 1:
        return BeamAnswers(request, sequences, detokenizer, scheduler)
    kind = Answers if request.sampling.best_of is None else BestAnswers
    return kind(request, sequences, detokenizer, scheduler)
