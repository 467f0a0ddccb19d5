"""OpenAI's route of responses: a chat whose answer is a list of items, and whose events say how they grow."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal
from uuid import uuid4

from megajax.inference.request import Output
from megajax.inference.sampling_settings import Sampling
from megajax.inference.server.body import RequestError
from megajax.inference.server.chat.answer_parts import AnswerParts, Kind, Part, Stage
from megajax.inference.server.config import ServerConfig
from megajax.inference.server.models import ServedModel
from megajax.inference.server.openai import Job, read_chat
from megajax.inference.server.response_fields import guide_of
from megajax.inference.server.values import Values

type Status = Literal["in_progress", "completed", "incomplete", "failed"]


def _identifier(prefix: str) -> str:
    return f"{prefix}_{uuid4().hex}"


class TextItem:
    """The message of an answer, or its reasoning."""

    def __init__(self, kind: Kind, index: int):
        """index: place among the items of the response."""
        self.kind = kind
        self._content = kind == "content"
        self._type = "output_text" if self._content else "reasoning_text"
        self._identifier, self._index, self._text = _identifier("msg" if self._content else "rs"), index, ""

    @property
    def text(self) -> str:
        """The text so far."""
        return self._text

    def item(self, status: Status) -> dict[str, Any]:
        """The entry of `output`."""
        content = [] if status == "in_progress" else [self._part()]
        head = {"type": "message", "role": "assistant"} if self._content else {"type": "reasoning", "summary": []}
        return {"id": self._identifier, **head, "status": status, "content": content}

    def opening(self) -> Iterator[dict[str, Any]]:
        """Events before the first text."""
        yield self._event("output_item.added", item=self.item("in_progress"))
        yield self._of_part("content_part.added", part=self._part())

    def add(self, text: str) -> dict[str, Any]:
        """The event of more text."""
        self._text += text
        return self._of_part(f"{self._type}.delta", delta=text, **self._scores())

    def closing(self, status: Status) -> Iterator[dict[str, Any]]:
        """Events after the last text."""
        yield self._of_part(f"{self._type}.done", text=self._text, **self._scores())
        yield self._of_part("content_part.done", part=self._part())
        yield self._event("output_item.done", item=self.item(status))

    def _part(self) -> dict[str, Any]:
        more = {"annotations": []} if self._content else {}
        return {"type": self._type, "text": self._text, **more, **self._scores()}

    def _scores(self) -> dict[str, Any]:
        return {"logprobs": []} if self._content else {}

    def _of_part(self, name: str, **more: Any) -> dict[str, Any]:
        return self._event(name, item_id=self._identifier, content_index=0, **more)

    def _event(self, name: str, **more: Any) -> dict[str, Any]:
        return {"type": f"response.{name}", "output_index": self._index, **more}


def _call_events(part: Part, index: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The item of a call, and its events."""
    call = {"id": _identifier("fc"), "type": "function_call", "call_id": _identifier("call"), "name": part.name}
    call |= {"arguments": part.text, "status": "completed"}
    place = {"output_index": index}
    of_item = {"item_id": call["id"], **place}
    return call, [
        {"type": "response.output_item.added", **place, "item": call | {"arguments": "", "status": "in_progress"}},
        {"type": "response.function_call_arguments.delta", **of_item, "delta": part.text},
        {"type": "response.function_call_arguments.done", **of_item, "name": part.name, "arguments": part.text},
        {"type": "response.output_item.done", **place, "item": call},
    ]


class ResponseForm:
    """Format of /v1/responses."""

    ending = ""

    def __init__(
        self,
        model: ServedModel,
        prompt: Sequence[int],
        settings: Sampling,
        values: Values,
        stages: Callable[[], Sequence[Stage]],
    ):
        """stages: makes the stages that find the parts of the answer."""
        self._tokenizer, self._prompt_tokens, self._parts = model.plain, len(prompt), AnswerParts(stages())
        self._items: list[dict[str, Any]] = []
        self._open: TextItem | None = None
        self._generated = self._shared = self._reasoning = self._number = 0
        self._status: Status = "in_progress"
        self._reason = "max_output_tokens"
        self._head = {
            "id": _identifier("resp"),
            "object": "response",
            "created_at": int(time.time()),
            "model": model.name,
            **_settings_of(settings, values),
        }

    def response(self, answers: Sequence[Output]) -> dict[str, Any]:
        """The response of a complete answer."""
        for answer in answers:
            self.events(answer)
        self.closing()
        return self._body()

    def opening(self) -> list[dict[str, Any]]:
        """Events before the first token."""
        body = self._body()
        return self._numbered([{"type": f"response.{name}", "response": body} for name in ("created", "in_progress")])

    def events(self, output: Output) -> list[dict[str, Any]]:
        """Events of an output of the answer."""
        self._generated += len(output.tokens)
        self._shared += output.shared
        if output.finish is not None:
            self._status = "incomplete" if output.finish in ("length", "abort") else "completed"
            self._reason = "aborted" if output.finish == "abort" else "max_output_tokens"
        parts = self._parts.add(output.text, last=output.finish is not None)
        return self._numbered([event for part in parts for event in self._add(part)])

    def closing(self) -> list[dict[str, Any]]:
        """Events after the last token."""
        # Clients expect a message, also if it is empty.
        events = [] if self._items or self._open else list(self._add(Part("content", "")))
        events += self._close(self._status)
        return self._numbered([*events, {"type": f"response.{self._status}", "response": self._body()}])

    def failure(self, error: RequestError) -> dict[str, Any]:
        """The event of an error that ends the stream."""
        self._status = "failed"
        fault = {"code": "server_error", "message": error.message}
        (event,) = self._numbered([{"type": "response.failed", "response": self._body() | {"error": fault}}])
        return event

    def _add(self, part: Part) -> Iterator[dict[str, Any]]:
        if self._open is None or self._open.kind != part.kind:
            yield from self._close("completed")
            if part.kind == "call":
                call, events = _call_events(part, len(self._items))
                self._items.append(call)
                yield from events
                return
            self._open = TextItem(part.kind, len(self._items))
            yield from self._open.opening()
        if part.text:
            yield self._open.add(part.text)

    def _close(self, status: Status) -> Iterator[dict[str, Any]]:
        """Ends the item whose text grows, if there is one."""
        if self._open is not None:
            item, self._open = self._open, None
            if item.kind == "reasoning":
                self._reasoning += len(self._tokenizer.encode(item.text))
            self._items.append(item.item(status))
            yield from item.closing(status)

    def _numbered(self, events: list[dict[str, Any]]) -> list[dict[str, Any]]:
        first, self._number = self._number, self._number + len(events)
        return [{**event, "sequence_number": number} for number, event in enumerate(events, start=first)]

    def _body(self) -> dict[str, Any]:
        cut = {"reason": self._reason} if self._status == "incomplete" else None
        usage = None if self._status in ("in_progress", "failed") else self._usage()
        state = {"status": self._status, "error": None, "incomplete_details": cut}
        return {**self._head, **state, "output": list(self._items), "usage": usage}

    def _usage(self) -> dict[str, Any]:
        computed = self._prompt_tokens - self._shared
        return {
            "input_tokens": self._prompt_tokens,
            "input_tokens_details": {"cached_tokens": self._shared, "cache_write_tokens": computed},
            "output_tokens": self._generated,
            "output_tokens_details": {"reasoning_tokens": self._reasoning},
            "total_tokens": self._prompt_tokens + self._generated,
        }


def _settings_of(settings: Sampling, values: Values) -> dict[str, Any]:
    """The settings that a response repeats."""
    choice, text, reasoning = values.get("tool_choice", "auto"), values.get("text", {}), values.get("reasoning", {})
    tools = [tool["function"] for tool in values.get("tools", [])]
    return {
        **{name: values.get(name) for name in ("instructions", "max_output_tokens", "user")},
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "tools": [{"type": "function", "parameters": None, "strict": None, **tool} for tool in tools],
        "tool_choice": choice if isinstance(choice, str) else {"type": "function", **choice["function"]},
        "parallel_tool_calls": values.get("parallel_tool_calls", True),
        "text": {"format": text.get("format", {"type": "text"})},
        "reasoning": {"effort": reasoning.get("effort"), "summary": None},
        "metadata": values.get("metadata", {}),
        "truncation": "disabled",
        "previous_response_id": None,
        "background": False,
        "store": False,
    }


async def response_job(values: Values, model: ServedModel, config: ServerConfig) -> Job:
    """The job of a body of /v1/responses. Raises RequestError."""
    system = [{"role": "system", "content": values["instructions"]}] if "instructions" in values else []
    values["messages"] = [*system, *values["input"]]
    if "effort" in values.get("reasoning", {}):
        values["reasoning_effort"] = values["reasoning"]["effort"]
    base = replace(model.sampling, guide=guide_of(values.get("text", {})))
    chat = await read_chat(values, model, config, base, "input")
    form = ResponseForm(model, chat.prompt, chat.sampling, values, chat.stages)
    names = {**values.names(), "prompt": "input", "guide": "tools" if chat.demands_call else "text"}
    stream = form if values.get("stream", False) else None
    return Job(
        prompts=[chat.prompt],
        sampling=chat.sampling,
        response=form.response,
        stream=stream,
        names=names,
        images=chat.images,
    )
