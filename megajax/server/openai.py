"""OpenAI's routes of completions: requests, and the formats of answers and events."""

import time
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

from megajax.inference.request import Output, Pooling, PromptImage, TokenScore
from megajax.inference.sampling_settings import BAD, Sampling
from megajax.server.body import invalid
from megajax.server.chat.answer_parts import THINK, AnswerParts, AnswerStage, Reasoning
from megajax.server.chat.tools import tool_use
from megajax.server.config import ServerConfig
from megajax.server.models import ServedModel, read_prompts, shortened
from megajax.server.request_values import RequestValues
from megajax.tokenizers.base import Tokenizer

MIN_LOGPROB = -9999.0
"""Replaces minus infinity, which JSON cannot express."""
TAIL = 16
"""Number of tokens at the end of a prompt that are searched for <think>."""


class TokenTexts:
    """Text and bytes of single tokens."""

    def __init__(self, tokenizer: Tokenizer, *, ids: bool = False):
        """ids: `token_id:` and the number in place of each text."""
        self._tokenizer, self._table, self._ids = tokenizer, tokenizer.table, ids

    def data(self, token: int) -> bytes:
        """Bytes of a token; those of its text if the tokenizer has no table of bytes."""
        if self._table is not None:
            return (self._table[token] if token < len(self._table) else None) or b""
        return self._tokenizer.decode([token]).encode("utf-8") if token < self._tokenizer.vocabulary_size else b""

    def text(self, token: int) -> str:
        """Text of a token; `bytes:` and hexadecimal escapes for incomplete characters, like OpenAI."""
        if self._ids:
            return f"token_id:{token}"
        data = self.data(token)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{value:02x}" for value in data)

    def offsets(self, tokens: Iterable[int], start: int = 0) -> list[int]:
        """Number of complete characters before each token."""
        decoder, offsets, at = getincrementaldecoder("utf-8")("replace"), [], start
        for token in tokens:
            offsets.append(at)
            at += len(decoder.decode(self.data(token)))
        return offsets


def finite(logprob: float) -> float:
    """A log-probability as a number that JSON can express."""
    return max(logprob, MIN_LOGPROB)


def completion_scores(
    texts: TokenTexts, tokens: Sequence[int], scores: Sequence[TokenScore | None], offset: int, count: int
) -> dict[str, Any]:
    """`logprobs` of /v1/completions. None is the score of the first token of a text, which has no prediction.

    count: number of most likely tokens. Each entry of top_logprobs includes the token itself; of tokens with the same
    text, it has the most likely one.
    """
    tops: list[dict[str, float] | None] = []
    for score in scores:
        if score is None:
            tops.append(None)
            continue
        top: dict[str, float] = {}
        for token, logprob in (*score.top[:count], (score.token, score.logprob)):
            text = texts.text(token)
            top[text] = max(finite(logprob), top.get(text, MIN_LOGPROB))
        tops.append(top)
    return {
        "tokens": [texts.text(token) for token in tokens],
        "token_logprobs": [None if score is None else finite(score.logprob) for score in scores],
        "top_logprobs": tops,
        "text_offset": texts.offsets(tokens, offset),
    }


def chat_scores(texts: TokenTexts, scores: Sequence[TokenScore]) -> dict[str, Any]:
    """`logprobs` of /v1/chat/completions."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        data = texts.data(token)
        return {"token": texts.text(token), "logprob": finite(logprob), "bytes": list(data)}

    content = [
        entry(score.token, score.logprob) | {"top_logprobs": [entry(token, logprob) for token, logprob in score.top]}
        for score in scores
    ]
    return {"content": content, "refusal": None}


def prompt_scores(
    texts: TokenTexts, scores: Sequence[TokenScore | None], count: int
) -> list[dict[str, dict[str, Any]] | None]:
    """`prompt_logprobs`, which is vLLM's: for each token of a prompt, its entry and those of the `count` most likely
    ones, by id; None for the first token."""

    def entry(token: int, logprob: float, rank: int | None) -> tuple[str, dict[str, Any]]:
        return str(token), {"logprob": finite(logprob), "rank": rank, "decoded_token": texts.text(token)}

    return [
        score
        and dict(
            [
                entry(score.token, score.logprob, score.rank),
                *(entry(*pair, rank) for rank, pair in enumerate(score.top[:count], start=1)),
            ]
        )
        for score in scores
    ]


@dataclass(frozen=True, kw_only=True)
class Job:
    """A parsed request."""

    prompts: Sequence[Sequence[int]]
    sampling: Sampling
    response: Callable[[Sequence[Output]], dict[str, Any]]
    """All answers -> the body of a response."""
    stream: "OpenAIForm | None" = None
    """The format of events; None for a single response."""
    names: dict[str, str]
    """Settings of `Sampling` -> fields of the request."""
    pooling: Pooling | None = None
    """Which embeddings of the prompts are requested, in place of answers."""
    images: tuple[PromptImage, ...] = ()
    """Images of the prompt, if there is one."""


class OpenAIForm:
    """Base class of the formats of both routes."""

    kind: str
    """`object` of a response."""
    chunk: str
    """`object` of an event."""
    prefix: str
    """Prefix of identifiers."""

    def __init__(self, model: ServedModel, prompts: Sequence[Sequence[int]], settings: Sampling, values: RequestValues):
        """values: the fields of the request."""
        self._texts, self._tokenizer, self._prompts, self._settings = (
            TokenTexts(model.tokenizer, ids=values.get("return_tokens_as_token_ids", False)),
            model.tokenizer,
            prompts,
            settings,
        )
        options = values.get("stream_options", {})
        self._with_usage = options.get("include_usage", False)
        self._usage_in_all = self._with_usage and options.get("continuous_usage_stats", False)
        self._echo, self._with_tokens = values.get("echo", False), values.get("return_token_ids", False)
        self._prompt_top = values.get("prompt_logprobs")
        self._prompt_tokens, self._generated, self._shared = sum(map(len, prompts)), 0, 0
        self._head = {"id": f"{self.prefix}{uuid4().hex}", "created": int(time.time()), "model": model.name}
        self._lengths: dict[int, int] = {}
        self._prompt_scores: dict[int, Sequence[TokenScore | None]] = {}

    def choice(self, output: Output, *, event: bool) -> dict[str, Any]:
        """An entry of `choices`."""
        raise NotImplementedError

    def response(self, answers: Sequence[Output]) -> dict[str, Any]:
        # The first answer to a prompt has the scores of the prompt for all answers.
        n = self._settings.n
        self._prompt_scores = {answer.choice // n: answer.prompt_scores for answer in answers[::n]}
        for answer in answers:
            self._count(answer)
        choices = [self.choice(answer, event=False) for answer in answers]
        return {**self._head, "object": self.kind, "choices": choices, "usage": self._usage()}

    def opening(self) -> list[dict[str, Any]]:
        """Events before the first token."""
        return []

    def event(self, output: Output) -> dict[str, Any]:
        """The event of an output of an answer."""
        self._count(output)
        return self._event([self.choice(output, event=True)])

    def closing(self) -> list[dict[str, Any]]:
        """Events after the last token."""
        return [{**self._event([]), "usage": self._usage()}] if self._with_usage else []

    def _count(self, output: Output) -> None:
        self._generated += len(output.tokens)
        self._shared += output.shared

    def _usage(self) -> dict[str, Any]:
        total = self._prompt_tokens + self._generated
        details = {"prompt_tokens_details": {"cached_tokens": self._shared}}
        counts = {"prompt_tokens": self._prompt_tokens, "completion_tokens": self._generated, "total_tokens": total}
        return counts | details

    def _event(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        event = {**self._head, "object": self.chunk, "choices": choices}
        return {**event, "usage": self._usage() if self._usage_in_all else None} if self._with_usage else event

    def _of_prompt(self, number: int) -> dict[str, Any]:
        """Tokens and scores of a prompt, if requested."""
        entries: dict[str, Any] = {"prompt_token_ids": list(self._prompts[number])} if self._with_tokens else {}
        if self._prompt_top is not None:
            scores = self._prompt_scores.get(number, ())
            entries["prompt_logprobs"] = prompt_scores(self._texts, scores, self._prompt_top)
        return entries

    def _of_answer(self, output: Output) -> dict[str, Any]:
        """Tokens of an answer, if requested."""
        return {"token_ids": list(output.tokens)} if self._with_tokens else {}


class CompletionForm(OpenAIForm):
    """Format of /v1/completions."""

    kind = chunk = "text_completion"
    prefix = "cmpl-"

    def choice(self, output: Output, *, event: bool) -> dict[str, Any]:
        number, first = output.choice // self._settings.n, output.choice not in self._lengths
        echoes = self._echo and first
        start = self._lengths.setdefault(output.choice, 0)
        text = self._tokenizer.decode(self._prompts[number]) + output.text if echoes else output.text
        self._lengths[output.choice] = start + len(text)
        logprobs = None
        if self._settings.logprobs is not None:
            prompt = self._prompts[number] if echoes else ()
            prompt_scores = self._prompt_scores.get(number, output.prompt_scores) if echoes else ()
            tokens, scores = [*prompt, *output.tokens], [*prompt_scores, *output.scores]
            logprobs = completion_scores(self._texts, tokens, scores, start, self._settings.logprobs)
        choice = {"index": output.choice, "text": text, "logprobs": logprobs, "finish_reason": output.finish}
        return choice | (self._of_prompt(number) if first else {}) | self._of_answer(output)


class ChatForm(OpenAIForm):
    """Format of /v1/chat/completions."""

    kind, chunk = "chat.completion", "chat.completion.chunk"
    prefix = "chatcmpl-"

    def __init__(
        self,
        model: ServedModel,
        prompts: Sequence[Sequence[int]],
        settings: Sampling,
        values: RequestValues,
        stages: Callable[[], Sequence[AnswerStage]],
    ):
        """stages: makes the stages that find the parts of an answer."""
        super().__init__(model, prompts, settings, values)
        self._parts = [AnswerParts(stages()) for _ in range(settings.n)]
        self._calls = [0] * settings.n

    def choice(self, output: Output, *, event: bool) -> dict[str, Any]:
        number, finish = output.choice, output.finish
        logprobs = None if self._settings.logprobs is None else chat_scores(self._texts, output.scores)
        parts = self._parts[number].add(output.text, last=finish is not None)
        content = "".join(part.text for part in parts if part.kind == "content")
        calls = [
            {
                **({"index": self._calls[number] + place} if event else {}),
                "id": f"call_{uuid4().hex}",
                "type": "function",
                "function": {"name": part.name, "arguments": part.text},
            }
            for place, part in enumerate(part for part in parts if part.kind == "call")
        ]
        self._calls[number] += len(calls)
        fields: dict[str, Any] = {"tool_calls": calls} if calls else {}
        if reasoning := "".join(part.text for part in parts if part.kind == "reasoning"):
            fields["reasoning_content"] = reasoning
        if event:
            delta = ({"content": content} if content else {}) | fields
            body: dict[str, Any] = {"delta": delta}
        else:
            text = content if content or not calls else None
            body = {"message": {"role": "assistant", "content": text, "refusal": None, **fields}}
        reason = "tool_calls" if finish == "stop" and self._calls[number] else finish
        choice = {"index": number, **body, "logprobs": logprobs, "finish_reason": reason}
        return choice | self._of_answer(output)

    def response(self, answers: Sequence[Output]) -> dict[str, Any]:
        return {**super().response(answers), **self._of_prompt(0)}

    def opening(self) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        first, *others = (
            self._event([{"index": number, "delta": delta, "logprobs": None, "finish_reason": None}])
            for number in range(self._settings.n)
        )
        return [{**first, **self._of_prompt(0)}, *others]


async def completion_job(values: RequestValues, model: ServedModel, config: ServerConfig) -> Job:
    """The job of a body of /v1/completions. Raises RequestError."""
    settings = _with_bad_words(values.sampling(_defaults(values, model)), values, model)
    if values.get("echo", False) and settings.logprobs is not None:
        settings = replace(settings, prompt_logprobs=max(settings.logprobs, settings.prompt_logprobs or 0))
        if values.get("stream", False) and settings.n > 1:
            raise invalid("n", "n must be 1 in a stream with echo and logprobs")
    _check_stream(values, settings)
    suffix = model.suffix if model.reads and values.get("add_special_tokens", True) else ()
    prompts = await read_prompts(values, model, config.prompts, suffix=suffix)
    prompts = [shortened(prompt, values, _longest(model, settings)) for prompt in prompts]
    form = CompletionForm(model, prompts, settings, values)
    return _job(values, settings, config, form, prompts, {"prompt": "prompt"})


async def chat_job(values: RequestValues, model: ServedModel, config: ServerConfig) -> Job:
    """The job of a body of /v1/chat/completions. Raises RequestError."""
    scored, top = values.pop("logprobs", False), values.pop("top_logprobs", None)
    if top is not None and not scored:
        raise invalid("top_logprobs", "top_logprobs needs logprobs=true")
    if scored:
        values["top_logprobs"] = top or 0
    # By default, an answer may fill the row.
    base = replace(_defaults(values, model), max_tokens=model.length)
    settings = _with_bad_words(values.sampling(base), values, model)
    use = tool_use(values, model, config)
    if use.guide is not None:
        if settings.guide is not None:
            raise invalid("tool_choice", "tool_choice demands a call: leave out the format of the answer")
        settings = replace(settings, guide=use.guide)
    prompt, images = await model.converse(values)
    if images and "truncate_prompt_tokens" in values:
        raise invalid("truncate_prompt_tokens", "truncate_prompt_tokens would cut images: leave it out")
    prompt = shortened(prompt, values, _longest(model, settings))

    # A guide holds from the first token on, so there is no reasoning.
    splits = config.reasoning and values.get("separate_reasoning", True) and settings.guide is None
    splits = splits and not use.finds_reasoning
    stage = use.stage if settings.guide is None or use.guide is not None or not use.finds_reasoning else None

    def stages() -> list[AnswerStage]:
        tail = [token for token in prompt[-TAIL:] if token < model.tokenizer.vocabulary_size]
        inside = model.tokenizer.decode(tail).rstrip().endswith(THINK)
        return [*([Reasoning(inside=inside)] if splits else []), *([stage()] if stage else [])]

    _check_stream(values, settings)
    form = ChatForm(model, [prompt], settings, values, stages)
    names = {"prompt": "messages"} | ({} if use.guide is None else {"guide": "tools"})
    return replace(_job(values, settings, config, form, [prompt], names), images=images)


def _with_bad_words(settings: Sampling, values: RequestValues, model: ServedModel) -> Sampling:
    """The settings with the tokens of `bad_words`, each at the start of a text and after a space.

    Raises RequestError for too many or too long words.
    """
    if not (words := [word.strip() for word in values.get("bad_words", ())]):
        return settings
    if len(words) > BAD // 2 or not all(words):
        expected = f"at most {BAD // 2} words, none of them empty"
        raise invalid("bad_words", f"bad_words must be {expected}, got {len(words):,}")
    texts = [text for word in words for text in (word, f" {word}")]
    tokens = tuple(dict.fromkeys(tuple(model.plain.encode(text).tolist()) for text in texts))
    settings = replace(settings, bad_tokens=tokens)
    for problem in settings.problems():
        raise invalid("bad_words", f"bad_words {problem.message}")
    return settings


def _longest(model: ServedModel, settings: Sampling) -> int:
    """Maximum number of tokens of a prompt."""
    return model.reads or model.length - min(1, settings.max_tokens)


def _defaults(values: RequestValues, model: ServedModel) -> Sampling:
    """Settings without those of a request. A beam search takes the probabilities of the model itself."""
    return Sampling() if values.get("beams") not in (None, 1) else model.sampling


def _job(
    values: RequestValues,
    settings: Sampling,
    config: ServerConfig,
    form: OpenAIForm,
    prompts: list[list[int]],
    names: Mapping[str, str],
) -> Job:
    """A job with a limited number of answers. names: `prompt`, and settings that other fields set -> their fields.

    Raises RequestError.
    """
    names = {**values.names(), **names}
    if (answers := len(prompts) * settings.choices()) > config.prompts:
        param = "best_of" if settings.choices() > settings.n else "n" if settings.n > 1 else names["prompt"]
        message = f"{len(prompts)} prompts with {settings.choices()} answers each make {answers:,} answers"
        raise invalid(param, f"{message}, at most {config.prompts} are allowed")
    stream = form if values.get("stream", False) else None
    return Job(prompts=prompts, sampling=settings, response=form.response, stream=stream, names=names)


def _check_stream(values: RequestValues, settings: Sampling) -> None:
    stream = values.get("stream", False)
    if "stream_options" in values and not stream:
        raise invalid("stream_options", "stream_options needs stream=true")
    if "prompt_logprobs" in values and stream:
        raise invalid("prompt_logprobs", "prompt_logprobs cannot be streamed: set stream=false")
    if stream and settings.choices() > settings.n:
        message = f"best_of={settings.choices()} is above n={settings.n}"
        raise invalid("best_of", f"{message}: the best answers are known only at the end, so they cannot be streamed")
