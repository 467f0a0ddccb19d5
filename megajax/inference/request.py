"""The engine's types: a Request is asked, each answer is a Sequence, a Step computes sequences, an Output comes back.

Plain Python: a server or a script can build requests, and a scheduler can run, without a device.
"""

from array import array
from collections import abc
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from megajax.batch import Params, Patches
from megajax.config.errors import UserError
from megajax.inference.sampling_settings import BAD_LENGTH, Sampling

type OtherWeights = Params | Callable[[], Params]

type Finish = Literal["stop", "length", "cancelled", "error", "abort"]
"""Why an answer ended: a stop string, a stop token or the end of the text; `max_tokens` or the maximum row length;
`cancel`; a fault of this request alone, for example non-finite logits; all requests were aborted."""

type Running = Literal["finish", "abort", "recompute", "keep"]
"""What becomes of unfinished requests when an engine pauses, sleeps or gets other weights. finish: they end first;
abort: they end at once, with what they have; recompute: they go on later, after all their tokens were computed again;
keep: they go on later with the keys that they have."""

type Announced = Callable[[str, tuple[Any, ...]], AbstractContextManager[None]]
"""Called with the name and the arguments of an operation of a device: a context in which this process runs its part,
after the others were told to run theirs."""

type Pooling = Literal["first", "last", "mean"]
"""The states of an embedding: that of the prompt's first or last token, or the mean over its tokens."""


FREED = -1
"""In place of a block that was released while its sequence runs."""


class TokenScore(NamedTuple):
    """A token and its log-probability."""

    token: int
    logprob: float
    """Log-probability under the model, before temperature, penalties and filters."""
    rank: int | None
    """1 + the number of more likely tokens; None with `Sampling.logprobs` = 0, which needs no more than sampling."""
    top: tuple[tuple[int, float], ...]
    """The most likely tokens and their log-probabilities, in descending order."""
    drawn: float | None = None
    """Log-probability in the distribution that it was drawn from, after temperature, penalties and filters; 0 for a
    greedy choice, None for a token that was not chosen: one of a prompt or of a beam."""


class LoadedAdapter(NamedTuple):
    """An adapter in a slot of the model's matrices."""

    name: str
    slot: int
    identity: bytes
    """Random; differs each time that an adapter is loaded, so that no block of another one is shared."""


class Output(NamedTuple):
    """New text and tokens of an answer; merged, the whole answer."""

    choice: int
    """Index among the n answers."""
    text: str = ""
    """Whole characters. Text that may become a stop string is delivered later or never."""
    tokens: tuple[int, ...] = ()
    """Includes the token that ended the answer, which has no text."""
    scores: tuple[TokenScore, ...] = ()
    """Scores of the tokens, if requested."""
    finish: Finish | None = None
    """None if more outputs follow."""
    prompt_scores: tuple[TokenScore | None, ...] = ()
    """Scores of the prompt, in the first output of choice 0, if requested; None for the first token."""
    shared: int = 0
    """Tokens of the prompt found in the cache, in the first output of choice 0."""
    admitted: float | None = None
    """`time.monotonic()` when the answer left the queue, in its first output; else None."""
    embedding: tuple[float, ...] = ()
    """The embedding of the prompt, of length 1, if `Request.pooling` asks for it."""
    problem: str = ""
    """With the finish "error": the setting of the request that is wrong, a space, and what is wrong; empty for a fault
    of the engine."""
    experts: Any = None
    """In the last output, if requested: an array [N, L, k] as `EngineDevice.experts` gives it."""

    def merge(self, following: "Output") -> "Output":
        """This output and the following one of the same answer as one output."""
        return Output(
            self.choice,
            self.text + following.text,
            self.tokens + following.tokens,
            self.scores + following.scores,
            following.finish,
            self.prompt_scores + following.prompt_scores,
            self.shared + following.shared,
            following.admitted if self.admitted is None else self.admitted,
            self.embedding + following.embedding,
            self.problem + following.problem,
            following.experts,
        )


class ImageInput(NamedTuple):
    """The images that a model reads within its text."""

    most: int
    """Maximum number of images of a row."""
    positions: int
    """Tokens of an image; with `patches`, the maximum."""
    token: int
    """Token id at these positions."""
    height: int = 0
    width: int = 0
    """Pixels of an image; 0 with `patches`."""
    patches: Patches | None = None
    """Images have any size; None: all have the same."""
    states: int = 1
    """States of the model's width at each position."""

    def shape(self) -> tuple[int, ...]:
        """Of `PromptImage.pixels` on the device."""
        if self.patches is None:
            return self.height, self.width, 3
        return self.patches.most, self.patches.side**2 * 3


class PromptImage(NamedTuple):
    """An image within a prompt."""

    first: int
    """Position of its first token."""
    count: int
    """Number of its tokens, at most `ImageInput.positions`."""
    pixels: Any
    """uint8 [height, width, 3]; of an image of any size, its patches [n, pixels]."""
    digest: bytes
    """Hash of the pixels and the grid."""
    grid: tuple[int, int] = (0, 0)
    """Rows and columns of patches; zeros for an image of the model's size."""
    merge: int = 1
    """Squares of patches with this side are one token."""

    def moves(self) -> int:
        """What it adds to the rotary positions behind it, beside its number of tokens."""
        return max(self.grid) // self.merge - self.count if self.grid[0] else 0


@dataclass(kw_only=True)
class Request:
    """A prompt with its settings and the receiver of its answers."""

    identifier: str
    prompt: tuple[int, ...]
    sampling: Sampling
    deliver: Callable[[Output], None]
    """Called on the engine's thread; it must not block."""
    memory: tuple[int, ...] = ()
    """Tokens for the model's encoder, if it has one; the prompt is then the start of the answer."""
    images: tuple[PromptImage, ...] = ()
    """The images of the prompt, in order; its other tokens are not those of images."""
    pooling: Pooling | None = None
    """Which embedding of the prompt to deliver, in place of an answer; then `sampling` must have max_tokens=0."""
    adapter: str | None = None
    """Name of the adapter that changes the model, see `Engine.load_adapter`; None: the model itself."""
    priority: int = 0
    """Requests with a lower value are admitted first and preempted last; equal ones in order of arrival."""
    experts: bool = False
    """Whether `Output.experts` are delivered, by a model whose cache keeps them."""
    cache_salt: bytes = b""
    """Blocks of the cache are shared only between requests with the same one."""
    guided: Any = None
    """The first state of `sampling.guide`, of `Engine.start_guide`; None: the engine makes it when it checks the
    request."""

    def text(self) -> tuple[int, ...]:
        """The prompt without the tokens of its images, which a tokenizer of text alone may lack."""
        places = {place for image in self.images for place in range(image.first, image.first + image.count)}
        return tuple(token for place, token in enumerate(self.prompt) if place not in places) if places else self.prompt


class RefusedRequest(UserError):
    """A request that the engine rejects."""

    def __init__(
        self,
        reason: Literal["queue_full", "too_long", "invalid", "draining"],
        message: str,
        field: str | None = None,
    ):
        """field: the invalid field, by its name in `Sampling` or `Request`."""
        super().__init__(message)
        self.reason, self.message, self.field = reason, message, field


class Drafter(Protocol):
    """Guesses the next tokens of one sequence."""

    def draft(self, tokens: list[int]) -> list[int]:
        """Tokens that may follow; none if there is no good guess. tokens: prompt and answer."""
        ...


@dataclass(eq=False, kw_only=True)
class Sequence:
    """An unfinished answer: its prompt, its tokens so far, and its place on the device."""

    order: tuple[int, int]
    """(arrival of the request, choice)."""
    priority: int = 0
    """The sequence with the smallest (priority, order) is never preempted for another."""
    origin: bytes = b""
    """What its keys depend on beside its tokens: sequences of the same origin share blocks."""
    tokens: list[int]
    """Prompt and answer. Grows only at its end; the last token has no keys yet."""
    limit: int
    """Maximum number of tokens, including the prompt."""
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    """Seed of this answer. Sampling depends on it and on the number of tokens, not on the step."""
    end_tokens: frozenset[int] = frozenset()
    """Tokens that end the answer; they may not be chosen before `sampling.min_tokens`."""
    memory: tuple[int, ...] = ()
    """Tokens for the encoder, which reads them when the sequence starts."""
    images: tuple[PromptImage, ...] = ()
    """Images of the prompt."""
    adapter: LoadedAdapter | None = None
    """The adapter that changes the model for this sequence."""
    unscored: bool = False
    """Scores of the prompt are requested and incomplete."""
    pooling: Pooling | None = None
    """Which embedding of the prompt is requested."""
    top: int | None = None
    """Number of most likely tokens to report with each token; None or 0 for neither these nor ranks."""
    guide: Any = None
    """State of the constraint of the text."""
    allowed: Any = None
    """Tokens that may be chosen, uint32 words as in `sampling.choose.Edits`; None: all."""
    drafter: Drafter | None = None
    """None for a sequence that gets one token in each step."""
    draft: list[int] = field(default_factory=list)
    """Tokens that may follow `tokens`, which the last scheduled step verifies."""
    paused: bool = False
    """Whether it waits for other sequences of its request: it is neither computed nor admitted."""
    prompt: int = 0
    """Tokens of the prompt."""
    logprob: float = 0.0
    """Sum of the log-probabilities of the answer's tokens."""
    computed: int = 0
    """Number of tokens whose keys are in the sequence's blocks after the last scheduled step."""
    awaited: int = 0
    """Number of its tokens that scheduled steps choose and that are not in `tokens` yet: at most one when a step is
    scheduled, which computes that token without knowing it."""
    blocks: array[int] = field(default_factory=lambda: array("i"))
    """The block of each place of its tokens; `FREED` for a place that no later step reads."""
    slot: int = -1
    """Index into the cache leaves per row; -1 if the sequence does not run."""
    freed: int = 0
    """Number of places at the start of `blocks` that are `FREED`."""
    published: int = 0
    """Number of blocks that other sequences may share."""
    shared: int = 0
    """Tokens of the prompt found in the cache before the first preemption."""
    admitted: float | None = None
    """`time.monotonic()` when the sequence first ran, until it is delivered."""
    digests: list[bytes] = field(default_factory=list)
    """Hashes of the full blocks of `tokens`, computed when needed."""
    preempted: int = 0
    """Number of preemptions."""

    def __post_init__(self) -> None:
        self.prompt = self.prompt or len(self.tokens)

    @property
    def generated(self) -> int:
        """Tokens of the answer."""
        return len(self.tokens) - self.prompt

    @property
    def length(self) -> int:
        """Number of tokens, with those that are awaited."""
        return len(self.tokens) + self.awaited

    @property
    def idle(self) -> bool:
        """Whether the next step cannot compute it: it is paused, or its next tokens depend on results that are awaited,
        as at its limit and in a beam search."""
        at_limit = self.length >= self.limit or self.sampling.beams > 1
        return self.paused or (self.awaited > 0 and at_limit)

    def forbidden(self, ahead: int = 0) -> frozenset[int]:
        """Tokens that may not be chosen next, or after this many more tokens."""
        forbidden = self.end_tokens if self.generated + ahead < self.sampling.min_tokens else frozenset()
        if not self.sampling.bad_tokens:
            return forbidden
        # Tokens of the prompt do not count, and such sequences have no drafts.
        answer = self.tokens[max(self.prompt, len(self.tokens) - BAD_LENGTH) :]
        count = len(answer) + 1
        return forbidden | {bad[-1] for bad in self.sampling.bad_tokens if answer[count - len(bad) :] == [*bad[:-1]]}

    @property
    def keeps_blocks(self) -> bool:
        """Whether steps read all tokens before the last one from the blocks, also behind the windows of attention."""
        return self.sampling.penalized()

    @property
    def whole(self) -> bool:
        """Whether the whole prompt is computed, without sharing blocks."""
        return self.unscored or self.pooling in ("first", "mean")


class Step(NamedTuple):
    """The work of a replica in a step of the device."""

    decode: list[tuple[Sequence, int]]
    """Sequences, and the position of the last token of each, which the tokens of `Sequence.draft` follow."""
    prompts: list[tuple[Sequence, int, int]]
    """Sequences, the first position of each, and the number of its tokens: together at most `EngineDevice.chunk` in
    whole tiles."""
    saves: abc.Sequence[tuple[int, int]] = ()
    """Slots of rows whose states go to slots of snapshots, before the step and before `restores`."""
    restores: abc.Sequence[tuple[int, int]] = ()
    """Slots of snapshots whose states go to slots of rows, before the step."""

    def parts(self) -> list[tuple[Sequence, int]]:
        """Sequences in the order of the device's results, and the number of computed tokens of each after the step,
        without drafts."""
        decoded = [(sequence, at + 1) for sequence, at in self.decode]
        return decoded + [(sequence, at + count) for sequence, at, count in self.prompts]


class Pooled(NamedTuple):
    """The states of a prompt's tokens in a step."""

    first: int
    """Position of the first of these tokens."""
    total: Any
    """Sum of the final norm's outputs, float32 [D]."""


class Sampled(NamedTuple):
    """The device's result for a sequence of a step."""

    token: int
    """Chosen from the logits of the sequence's last token in the step before its draft; ignored if more of its tokens
    follow. -1 if the logits were not finite, or no token was allowed."""
    logprob: float
    """Log-probability under the model, before temperature, penalties and filters."""
    rank: int | None = None
    """1 + the number of more likely tokens; None if `Sequence.top` requests none."""
    top: tuple[tuple[int, float], ...] = ()
    """The `Sequence.top` most likely tokens and their log-probabilities, in descending order."""
    finite: bool = True
    """Whether all logits of the sequence were finite."""
    prompt: tuple[TokenScore, ...] = ()
    """If `Sequence.unscored`: scores of the prompt tokens that follow those in the step, with the
    `Sampling.prompt_logprobs` most likely tokens."""
    following: "tuple[Sampled, ...]" = ()
    """The results after each token of `Sequence.draft`; without meaning after a token that was not chosen."""
    pooled: Pooled | None = None
    """If `Sequence.pooling` and if the step has such tokens: their states."""
    drawn: float = 0.0
    """As `TokenScore.drawn`."""

    def score(self, count: int) -> TokenScore:
        """The score of the chosen token, with the `count` most likely tokens."""
        return TokenScore(self.token, self.logprob, self.rank, self.top[:count], self.drawn)


class StartedStep(Protocol):
    """A step that the device computes meanwhile."""

    def choose(self) -> None:
        """Start the choice of the next tokens, from the present state of the sequences: all earlier steps must have
        been received. Called once, before the next step is started."""
        ...

    def results(self) -> abc.Sequence[abc.Sequence[Sampled]]:
        """Wait for the results of each replica, in the order of `Step.parts`; called once, after `choose`."""
        ...


class MovableWeights(Protocol):
    """The weights of a device's steps: `megajax.inference.device.ModelWeights`, or a stand-in in tests."""

    def prepare(self, weights: OtherWeights, *, shared: bool = False) -> Callable[[], Params]:
        """Check other weights -> a function that makes those of the steps; shared: see `Engine.refit`.

        Raises UserError; changes nothing.
        """
        ...

    def replace(self, make: Callable[[], Params]) -> None:
        """Compute the following steps with the weights that `make` returns. The old ones are released first, so if it
        raises, there are none."""
        ...

    def sleep(self, *, keep: bool) -> None:
        """Release the devices' memory of weights and cache. keep: the weights go to the host's memory."""
        ...

    def wake(self) -> None:
        """Move weights back to the devices, and make an empty cache. Raises UserError if there are no weights."""
        ...


class EngineDevice(Protocol):
    """Compiled steps of a model with its cache: `megajax.inference.device.ModelDevice`, or a stand-in in tests."""

    rows: int
    """Maximum number of sequences that run at the same time in a replica, decoding ones and prompts together."""
    chunk: int
    """Maximum number of prompt tokens in a step; a multiple of `tile`."""
    tile: int
    """A step computes this many tokens of a prompt, or a multiple; `chunk` if it can compute one prompt only."""
    block: int
    """Tokens of a block."""
    blocks: int
    """Blocks of a replica."""
    replicas: int
    length: int
    """Maximum number of tokens of a sequence, prompt and answer."""
    top: int
    """Maximum of `Sequence.top`."""
    vocabulary: int
    """Number of token ids."""
    drafts: int
    """Maximum number of tokens of `Sequence.draft`."""
    prefix_sharing: bool
    """Whether sequences may share blocks; if layers keep a state per row, only with `snapshots`."""
    snapshots: int
    """Number of slots after those of rows, for states at the ends of prefixes."""
    window: int | None
    """Maximum number of tokens before a token that its computation reads from the blocks; None: all."""
    memory: int
    """Maximum number of tokens of `Sequence.memory`; 0 for a model without an encoder."""
    images: ImageInput | None
    """The images that the model reads; None: text alone."""
    generates: bool
    """Whether it gives next tokens; otherwise embeddings alone."""
    experts: Callable[[int, Sequence], Any] | None
    """The number of a replica and a sequence that runs there -> int16 [N, L, k], as `megajax.layers.context.Context`
    has them, of each token that was computed and further places; None: the cache has no experts."""

    def start(self, work: abc.Sequence[Step | None]) -> "StartedStep":
        """Start a step of each replica. A row's awaited token is the one that the previous step chose for its slot."""
        ...
