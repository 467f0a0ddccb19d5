"""OpenAI's two routes: what requests ask for, and the form of answers and events."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol
from uuid import uuid4

from megajax.inference.request import Sampling
from megajax.inference.server.calls import Growth
from megajax.inference.server.config import ServerConfig
from megajax.inference.server.errors import invalid
from megajax.inference.server.fields import CHAT, COMPLETIONS, Fields, check, demand, names_by_setting, one_of, sampling
from megajax.inference.server.models import ServedModel, find_model
from megajax.inference.server.prompts import read_prompts
from megajax.inference.server.scores import TokenTexts, chat_scores, completion_scores


class Form(Protocol):
    """How the answers of a job are written."""

    def whole(self, answers: Mapping[int, Growth]) -> dict[str, Any]:
        """The body of a response."""
        ...

    def opening(self) -> list[dict[str, Any]]:
        """Events before the first token."""
        ...

    def event(self, growth: Growth) -> dict[str, Any]:
        """What an answer grew by."""
        ...

    def closing(self) -> list[dict[str, Any]]:
        """Events after the last token."""
        ...


@dataclass(frozen=True, kw_only=True)
class Job:
    """A request that was understood."""

    model: ServedModel
    prompts: Sequence[Sequence[int]]
    sampling: Sampling
    form: Form
    stream: bool = False
    names: dict[str, str] = field(default_factory=dict)
    """Settings of `Sampling` -> fields of the request."""


class Usage:
    """Tokens of a request."""

    def __init__(self, prompts: Sequence[Sequence[int]]):
        self.prompt, self.generated = sum(map(len, prompts)), 0

    def body(self) -> dict[str, int]:
        total = self.prompt + self.generated
        return {"prompt_tokens": self.prompt, "completion_tokens": self.generated, "total_tokens": total}


class OpenAIForm:
    """What the forms of both routes share."""

    kind: str
    """`object` of a response."""
    chunk: str
    """`object` of an event."""
    prefix: str
    """Of identifiers."""

    def __init__(self, model: ServedModel, prompts: Sequence[Sequence[int]], *, with_usage: bool):
        """with_usage: the last event has the usage."""
        self.texts, self.usage, self._with_usage = TokenTexts(model.tokenizer), Usage(prompts), with_usage
        self._head = {"id": f"{self.prefix}{uuid4().hex}", "created": int(time.time()), "model": model.name}

    def choice(self, growth: Growth, *, event: bool) -> dict[str, Any]:
        """An entry of `choices`."""
        raise NotImplementedError

    def whole(self, answers: Mapping[int, Growth]) -> dict[str, Any]:
        choices = [self.choice(growth, event=False) for _, growth in sorted(answers.items())]
        self.usage.generated = sum(len(growth.tokens) for growth in answers.values())
        return {**self._head, "object": self.kind, "choices": choices, "usage": self.usage.body()}

    def opening(self) -> list[dict[str, Any]]:
        return []

    def event(self, growth: Growth) -> dict[str, Any]:
        self.usage.generated += len(growth.tokens)
        return self._event([self.choice(growth, event=True)])

    def closing(self) -> list[dict[str, Any]]:
        return [{**self._event([]), "usage": self.usage.body()}] if self._with_usage else []

    def _event(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        event = {**self._head, "object": self.chunk, "choices": choices}
        return {**event, "usage": None} if self._with_usage else event


class CompletionForm(OpenAIForm):
    """Of /v1/completions."""

    kind = chunk = "text_completion"
    prefix = "cmpl-"

    def __init__(
        self,
        model: ServedModel,
        prompts: Sequence[Sequence[int]],
        settings: Sampling,
        *,
        echo: bool,
        with_usage: bool,
    ):
        super().__init__(model, prompts, with_usage=with_usage)
        self._prompts, self._settings = prompts, settings
        self._echoes = [model.tokenizer.decode(prompt) for prompt in prompts] if echo else [""] * len(prompts)
        self._echo = echo
        self._lengths: dict[int, int] = {}
        self._prompt_scores: dict[int, tuple[Any, ...]] = {}

    def whole(self, answers: Mapping[int, Growth]) -> dict[str, Any]:
        self._prompt_scores = {
            number // self._settings.n: growth.prompt_scores
            for number, growth in answers.items()
            if growth.prompt_scores
        }
        return super().whole(answers)

    def choice(self, growth: Growth, *, event: bool) -> dict[str, Any]:
        prompt, first = growth.number // self._settings.n, growth.number not in self._lengths
        start = self._lengths.setdefault(growth.number, 0)
        echo = self._echoes[prompt] if first else ""
        text = echo + growth.text
        self._lengths[growth.number] = start + len(text)
        tokens, scores = list(growth.tokens), list[Any](growth.scores)
        logprobs = None
        if self._settings.logprobs is not None:
            if self._echo and first:
                tokens = [*self._prompts[prompt], *tokens]
                scores = [*(self._prompt_scores.get(prompt) or growth.prompt_scores), *scores]
            logprobs = completion_scores(self.texts, tokens, scores, start)
        return {"index": growth.number, "text": text, "logprobs": logprobs, "finish_reason": growth.finish}


class ChatForm(OpenAIForm):
    """Of /v1/chat/completions."""

    kind, chunk = "chat.completion", "chat.completion.chunk"
    prefix = "chatcmpl-"

    def __init__(self, model: ServedModel, prompt: Sequence[int], settings: Sampling, *, with_usage: bool):
        super().__init__(model, [prompt], with_usage=with_usage)
        self._settings = settings

    def choice(self, growth: Growth, *, event: bool) -> dict[str, Any]:
        scored = self._settings.logprobs is not None
        logprobs = chat_scores(self.texts, growth.scores) if scored else None
        if event:
            said = {"delta": {"content": growth.text} if growth.text else {}}
        else:
            said = {"message": {"role": "assistant", "content": growth.text, "refusal": None}}
        return {"index": growth.number, **said, "logprobs": logprobs, "finish_reason": growth.finish}

    def opening(self) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        return [
            self._event([{"index": number, "delta": delta, "logprobs": None, "finish_reason": None}])
            for number in range(self._settings.n)
        ]


async def completion_job(body: Mapping[str, Any], models: Mapping[str, ServedModel], config: ServerConfig) -> Job:
    """What a body of /v1/completions asks for. Raises RequestError."""
    values = check(body, COMPLETIONS)
    model = find_model(models, values)
    demand(values, "prompt")
    echo, stream = values.get("echo", False), values.get("stream", False)
    settings = sampling(values, COMPLETIONS, replace(Sampling(), guide=_guide(values)))
    if echo and settings.logprobs is not None:
        settings = replace(settings, prompt_logprobs=settings.logprobs)
        if stream and settings.n > 1:
            raise invalid("n", "n must be 1 in a stream with echo and logprobs")
    _check_stream(values, settings)
    prompts = await read_prompts(values, model, config.prompts)
    _check_answers(prompts, settings, config, "prompt")
    form = CompletionForm(model, prompts, settings, echo=echo, with_usage=values.get("stream_options", False))
    names = _names(COMPLETIONS, values) | {"prompt": "prompt"}
    return Job(model=model, prompts=prompts, sampling=settings, form=form, stream=stream, names=names)


async def chat_job(body: Mapping[str, Any], models: Mapping[str, ServedModel], config: ServerConfig) -> Job:
    """What a body of /v1/chat/completions asks for. Raises RequestError."""
    values = check(body, CHAT)
    model = find_model(models, values)
    messages = demand(values, "messages")
    one_of(values, "max_tokens", "max_completion_tokens")
    scored, top = values.pop("logprobs", False), values.pop("top_logprobs", None)
    if top is not None and not scored:
        raise invalid("top_logprobs", "top_logprobs needs logprobs=true")
    if scored:
        values["top_logprobs"] = top or 0
    # Without a limit, an answer may have all of the row that its prompt leaves.
    base = replace(Sampling(), max_tokens=model.length, guide=_guide(values))
    settings = sampling(values, CHAT, base)
    _check_stream(values, settings)
    prompt = await model.converse(messages)
    _check_answers([prompt], settings, config, "messages")
    form = ChatForm(model, prompt, settings, with_usage=values.get("stream_options", False))
    names = _names(CHAT, values) | {"prompt": "messages"}
    return Job(
        model=model, prompts=[prompt], sampling=settings, form=form, stream=values.get("stream", False), names=names
    )


def _names(fields: Fields, values: Mapping[str, Any]) -> dict[str, str]:
    return names_by_setting(fields, values) | {"guide": "response_format"}


def _check_stream(values: Mapping[str, Any], settings: Sampling) -> None:
    stream = values.get("stream", False)
    if "stream_options" in values and not stream:
        raise invalid("stream_options", "stream_options needs stream=true")
    if stream and settings.choices() > settings.n:
        what = f"best_of={settings.choices()} is above n={settings.n}"
        raise invalid("best_of", f"{what}: the best are known at the end, so they cannot be streamed")


def _check_answers(prompts: Sequence[Any], settings: Sampling, config: ServerConfig, param: str) -> None:
    if (answers := len(prompts) * settings.choices()) > config.prompts:
        param = "best_of" if settings.choices() > settings.n else "n" if settings.n > 1 else param
        what = f"{len(prompts)} prompts with {settings.choices()} answers each make {answers:,} answers"
        raise invalid(param, f"{what}, at most {config.prompts} are allowed")


def _guide(values: Mapping[str, Any]) -> Any:
    """The JSON schema that `response_format` asks for; None for any text. Raises RequestError."""
    asked = values.get("response_format")
    if asked is None:
        return None
    name, kinds = "response_format", "text, json_object or json_schema"
    kind, wrong = asked.get("type"), asked.keys() - {"type", "json_schema"}
    if (
        kind not in ("text", "json_object", "json_schema")
        or wrong
        or ("json_schema" in asked) != (kind == "json_schema")
    ):
        raise invalid(name, f"{name} must have a type, {kinds}, the last with a json_schema, and nothing else")
    if kind != "json_schema":
        return {"type": "object"} if kind == "json_object" else None
    described = asked["json_schema"]
    if not isinstance(described, dict) or not isinstance(described.get("schema"), dict):
        raise invalid(f"{name}.json_schema", f"{name}.json_schema must be an object with an object `schema`")
    if unknown := described.keys() - {"name", "description", "schema", "strict"}:
        raise invalid(f"{name}.json_schema", f"{name}.json_schema: unknown field {min(unknown)[:60]!r}")
    return described["schema"]
