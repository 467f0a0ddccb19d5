"""OpenAI's two routes: requests, and the formats of answers and events."""

import time
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

from megajax.inference.request import Output, TokenScore
from megajax.inference.sampling_settings import Sampling, abbreviated
from megajax.inference.server.body import CHAT, COMPLETIONS, Values, invalid
from megajax.inference.server.config import ServerConfig
from megajax.inference.server.models import ServedModel, read_prompts
from megajax.tokenizers.base import Tokenizer

MIN_LOGPROB = -9999.0
"""Replaces minus infinity, which JSON cannot express."""


class TokenTexts:
    """Text and bytes of single tokens."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer, self._table = tokenizer, tokenizer.table

    def data(self, token: int) -> bytes:
        """Bytes of a token; those of its text if the tokenizer has no table of bytes."""
        if self._table is not None:
            return (self._table[token] if token < len(self._table) else None) or b""
        return self._tokenizer.decode([token]).encode("utf-8") if token < self._tokenizer.vocabulary_size else b""

    def text(self, token: int) -> str:
        """Text of a token; `bytes:` and hexadecimal escapes for incomplete characters, like OpenAI."""
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
    texts: TokenTexts, tokens: Sequence[int], scores: Sequence[TokenScore | None], offset: int
) -> dict[str, Any]:
    """`logprobs` of /v1/completions. None is the score of the first token of a text, which has no prediction.

    Each entry of top_logprobs includes the token itself; of tokens with the same text, it has the most likely one.
    """
    tops: list[dict[str, float] | None] = []
    for score in scores:
        if score is None:
            tops.append(None)
            continue
        top: dict[str, float] = {}
        for token, logprob in (*score.top, (score.token, score.logprob)):
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


class OpenAIForm:
    """Base class of the formats of both routes."""

    kind: str
    """`object` of a response."""
    chunk: str
    """`object` of an event."""
    prefix: str
    """Prefix of identifiers."""

    def __init__(self, model: ServedModel, prompts: Sequence[Sequence[int]], settings: Sampling, values: Values):
        """values: the fields of the request."""
        self._texts, self._tokenizer, self._prompts, self._settings = (
            TokenTexts(model.tokenizer),
            model.tokenizer,
            prompts,
            settings,
        )
        self._with_usage, self._echo = values.get("stream_options", False), values.get("echo", False)
        self._prompt_tokens, self._generated = sum(map(len, prompts)), 0
        self._head = {"id": f"{self.prefix}{uuid4().hex}", "created": int(time.time()), "model": model.name}
        self._lengths: dict[int, int] = {}
        self._prompt_scores: dict[int, tuple[Any, ...]] = {}

    def choice(self, output: Output, *, event: bool) -> dict[str, Any]:
        """An entry of `choices`."""
        raise NotImplementedError

    def response(self, answers: Sequence[Output]) -> dict[str, Any]:
        choices = [self.choice(answer, event=False) for answer in answers]
        self._generated = sum(len(answer.tokens) for answer in answers)
        return {**self._head, "object": self.kind, "choices": choices, "usage": self._usage()}

    def opening(self) -> list[dict[str, Any]]:
        """Events before the first token."""
        return []

    def event(self, output: Output) -> dict[str, Any]:
        """The event of a output of an answer."""
        self._generated += len(output.tokens)
        return self._event([self.choice(output, event=True)])

    def closing(self) -> list[dict[str, Any]]:
        """Events after the last token."""
        return [{**self._event([]), "usage": self._usage()}] if self._with_usage else []

    def _usage(self) -> dict[str, int]:
        total = self._prompt_tokens + self._generated
        return {"prompt_tokens": self._prompt_tokens, "completion_tokens": self._generated, "total_tokens": total}

    def _event(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        event = {**self._head, "object": self.chunk, "choices": choices}
        return {**event, "usage": None} if self._with_usage else event


class CompletionForm(OpenAIForm):
    """Format of /v1/completions."""

    kind = chunk = "text_completion"
    prefix = "cmpl-"

    def response(self, answers: Sequence[Output]) -> dict[str, Any]:
        # The first answer to a prompt has the scores of the prompt for all answers.
        n = self._settings.n
        self._prompt_scores = {answer.choice // n: answer.prompt_scores for answer in answers[::n]}
        return super().response(answers)

    def choice(self, output: Output, *, event: bool) -> dict[str, Any]:
        number, echoes = output.choice // self._settings.n, self._echo and output.choice not in self._lengths
        start = self._lengths.setdefault(output.choice, 0)
        text = self._tokenizer.decode(self._prompts[number]) + output.text if echoes else output.text
        self._lengths[output.choice] = start + len(text)
        logprobs = None
        if self._settings.logprobs is not None:
            prompt = self._prompts[number] if echoes else ()
            prompt_scores = self._prompt_scores.get(number, output.prompt_scores) if echoes else ()
            tokens, scores = [*prompt, *output.tokens], [*prompt_scores, *output.scores]
            logprobs = completion_scores(self._texts, tokens, scores, start)
        return {"index": output.choice, "text": text, "logprobs": logprobs, "finish_reason": output.finish}


class ChatForm(OpenAIForm):
    """Format of /v1/chat/completions."""

    kind, chunk = "chat.completion", "chat.completion.chunk"
    prefix = "chatcmpl-"

    def choice(self, output: Output, *, event: bool) -> dict[str, Any]:
        logprobs = None if self._settings.logprobs is None else chat_scores(self._texts, output.scores)
        if event:
            content = {"delta": {"content": output.text} if output.text else {}}
        else:
            content = {"message": {"role": "assistant", "content": output.text, "refusal": None}}
        return {"index": output.choice, **content, "logprobs": logprobs, "finish_reason": output.finish}

    def opening(self) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        return [
            self._event([{"index": number, "delta": delta, "logprobs": None, "finish_reason": None}])
            for number in range(self._settings.n)
        ]


async def completion_job(body: Mapping[str, Any], model: ServedModel, config: ServerConfig) -> Job:
    """The job of a body of /v1/completions. Raises RequestError."""
    values = Values(body, COMPLETIONS)
    model.demand_name(values)
    values.demand("prompt")
    settings = values.sampling(replace(Sampling(), guide=_guide(values)))
    if values.get("echo", False) and settings.logprobs is not None:
        settings = replace(settings, prompt_logprobs=settings.logprobs)
        if values.get("stream", False) and settings.n > 1:
            raise invalid("n", "n must be 1 in a stream with echo and logprobs")
    _check_stream(values, settings)
    prompts = await read_prompts(values, model, config.prompts)
    return _job(values, settings, config, CompletionForm(model, prompts, settings, values), prompts, "prompt")


async def chat_job(body: Mapping[str, Any], model: ServedModel, config: ServerConfig) -> Job:
    """The job of a body of /v1/chat/completions. Raises RequestError."""
    values = Values(body, CHAT)
    model.demand_name(values)
    messages, old, new = values.demand("messages"), values.get("max_tokens"), values.get("max_completion_tokens")
    if "max_tokens" in values and "max_completion_tokens" in values and old != new:
        message = f"max_completion_tokens is {abbreviated(new)}, max_tokens is {abbreviated(old)}"
        raise invalid("max_completion_tokens", f"{message}: both are the same setting, give one of them")
    scored, top = values.pop("logprobs", False), values.pop("top_logprobs", None)
    if top is not None and not scored:
        raise invalid("top_logprobs", "top_logprobs needs logprobs=true")
    if scored:
        values["top_logprobs"] = top or 0
    # By default, an answer may fill the row.
    settings = values.sampling(replace(Sampling(), max_tokens=model.length, guide=_guide(values)))
    _check_stream(values, settings)
    prompts = [await model.converse(messages)]
    return _job(values, settings, config, ChatForm(model, prompts, settings, values), prompts, "messages")


def _job(
    values: Values, settings: Sampling, config: ServerConfig, form: OpenAIForm, prompts: list[list[int]], param: str
) -> Job:
    """A job with a limited number of answers. param: field of the prompts. Raises RequestError."""
    names = {**values.names(), "guide": "response_format", "prompt": param}
    if (answers := len(prompts) * settings.choices()) > config.prompts:
        param = "best_of" if settings.choices() > settings.n else "n" if settings.n > 1 else param
        message = f"{len(prompts)} prompts with {settings.choices()} answers each make {answers:,} answers"
        raise invalid(param, f"{message}, at most {config.prompts} are allowed")
    stream = form if values.get("stream", False) else None
    return Job(prompts=prompts, sampling=settings, response=form.response, stream=stream, names=names)


def _check_stream(values: Values, settings: Sampling) -> None:
    stream = values.get("stream", False)
    if "stream_options" in values and not stream:
        raise invalid("stream_options", "stream_options needs stream=true")
    if stream and settings.choices() > settings.n:
        message = f"best_of={settings.choices()} is above n={settings.n}"
        raise invalid("best_of", f"{message}: the best answers are known only at the end, so they cannot be streamed")


def _guide(values: Values) -> Any:
    """The JSON schema of `response_format`; None for any text. Raises RequestError."""
    response_format = values.get("response_format")
    if response_format is None:
        return None
    name, kinds = "response_format", "text, json_object or json_schema"
    kind, unknown_keys = response_format.get("type"), response_format.keys() - {"type", "json_schema"}
    if (
        kind not in ("text", "json_object", "json_schema")
        or unknown_keys
        or ("json_schema" in response_format) != (kind == "json_schema")
    ):
        raise invalid(name, f"{name} must have a type, {kinds}, the last with a json_schema, and nothing else")
    if kind != "json_schema":
        return {"type": "object"} if kind == "json_object" else None
    described = response_format["json_schema"]
    if not isinstance(described, dict) or not isinstance(described.get("schema"), dict):
        raise invalid(f"{name}.json_schema", f"{name}.json_schema must be an object with an object `schema`")
    if unknown := described.keys() - {"name", "description", "schema", "strict"}:
        raise invalid(f"{name}.json_schema", f"{name}.json_schema: unknown field {min(unknown)[:60]!r}")
    return described["schema"]
