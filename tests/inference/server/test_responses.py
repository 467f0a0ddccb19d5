"""OpenAI's route of responses: items in and out, events, functions, and what is refused."""

import json
from typing import Any

import openai
import pytest
from echo_device import BAD
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from served import Running, start, stop

from megajax.inference.server.config import ServerConfig

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"place": {"type": "string"}},
    "required": ["place"],
    "additionalProperties": False,
}
WEATHER: dict[str, Any] = {
    "type": "function", "name": "weather", "description": "Of a place.", "parameters": PARAMETERS, "strict": True,
}  # fmt: skip
CALL = '<tool_call>{"name": "weather", "arguments": {"place": "Rom"}}</tool_call>'
TEMPLATE = (
    "{% for m in messages %}{% if m.role != 'user' %}({{ m.role }}){% endif %}"
    "{% if m.reasoning_content %}[{{ m.reasoning_content }}]{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments.place }} {{ c.id }}]{% endfor %}"
    "{% if m.role == 'tool' %}={{ m.tool_call_id }}{% endif %}{% endfor %}"
    "{{ reasoning_effort }}{% if tools %}{{ tools[0].function.name }}{% endif %}{# <tool_call> #}"
)


def prompt_of(running: Running, **body: Any) -> str:
    """The prompt that the model reads."""
    answer = running.ask("/v1/responses", {"input": "a", "max_output_tokens": 1, **body})
    assert answer.status_code == 200, answer.text
    row = running.device.seen[0]
    return bytes(row.tokens[: row.prompt]).decode()


def events_of(running: Running, **body: Any) -> list[dict[str, Any]]:
    """The events of a stream, which have the types of the official client, without the last line of chats."""
    text = running.ask("/v1/responses", {**body, "stream": True}).text
    events, adapter = [], TypeAdapter(ResponseStreamEvent)
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
        adapter.validate_python(events[-1])
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def test_a_text(client: openai.OpenAI) -> None:
    response = client.responses.create(
        model="tiny", instructions="Be brief.", input="hi!", max_output_tokens=9, temperature=0, store=True,
        metadata={"job": "a"}, truncation="disabled", include=["reasoning.encrypted_content"], user="me",
    )  # fmt: skip
    Response.model_validate(response.model_dump(warnings=False))
    assert (response.output_text, response.status) == ("(system)B", "incomplete")
    assert response.incomplete_details and response.incomplete_details.reason == "max_output_tokens"
    assert response.usage and (response.usage.input_tokens, response.usage.output_tokens) == (20, 9)
    assert response.usage.total_tokens == 29 and response.usage.input_tokens_details.cached_tokens in (0, 16)
    assert (response.instructions, response.metadata, response.temperature) == ("Be brief.", {"job": "a"}, 0)


def test_the_events_of_a_text(running: Running) -> None:
    events = events_of(running, input="hello<", stop="<")
    kinds = [event["type"].removeprefix("response.") for event in events if "delta" not in event["type"]]
    assert kinds == [
        *("created", "in_progress", "output_item.added", "content_part.added", "output_text.done"),
        *("content_part.done", "output_item.done", "completed"),
    ]
    deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    last = events[-1]["response"]
    assert "".join(deltas) == events[-4]["text"] == last["output"][0]["content"][0]["text"] == "hello"
    assert events[-2]["item"] == last["output"][0] and last["status"] == "completed" and last["usage"]
    assert events[0]["response"]["status"] == "in_progress" and events[0]["response"]["id"] == last["id"]
    whole = running.ask("/v1/responses", {"input": "hello<", "stop": "<"}).json()
    assert whole.keys() == last.keys() and whole["usage"]["total_tokens"] == last["usage"]["total_tokens"]


def test_reasoning_and_calls_are_items(client: openai.OpenAI, running: Running) -> None:
    body: Any = {"input": f"<think>Hm.</think>Look: {CALL}!", "tools": [WEATHER]}
    response = client.responses.create(model="tiny", **body, extra_body={"stop": ["!"]})
    Response.model_validate(response.model_dump(warnings=False))
    thought, message, call = response.output
    assert thought.type == "reasoning" and thought.content and thought.content[0].text == "Hm."
    assert message.type == "message" and response.output_text == "Look:"
    assert call.type == "function_call" and (call.name, call.arguments) == ("weather", '{"place": "Rom"}')
    assert response.usage and response.usage.output_tokens_details.reasoning_tokens == 3
    assert response.status == "completed" and response.tools[0].to_dict() == WEATHER
    events = events_of(running, **body, stop="!")
    last = events[-1]["response"]
    assert [item["type"] for item in last["output"]] == ["reasoning", "message", "function_call"]
    ended = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert ended == last["output"] and [event["output_index"] for event in events[2:-1]] == sorted(
        event["output_index"] for event in events[2:-1]
    )
    arguments = [event for event in events if "function_call_arguments" in event["type"]]
    assert [event.get("delta", event.get("arguments")) for event in arguments] == ['{"place": "Rom"}'] * 2


def test_the_stream_of_the_client(client: openai.OpenAI) -> None:
    with client.responses.stream(
        model="tiny", input=f"{CALL}!", tools=[WEATHER], extra_body={"stop": ["!"]}, tool_choice="auto"
    ) as stream:  # type: ignore[arg-type]
        list(stream)
        (call,) = stream.get_final_response().output
    assert call.type == "function_call" and call.arguments == '{"place": "Rom"}'


def test_items_become_messages(client: openai.OpenAI, running: Running) -> None:
    """Also those of an earlier response, as the client has them."""
    body: Any = {"input": f"<think>Hm.</think>Look: {CALL}!", "tools": [WEATHER]}
    response = client.responses.create(model="tiny", **body, extra_body={"stop": ["!"]})
    earlier = [item.model_dump(exclude_none=True, warnings=False) for item in response.output]
    name = earlier[-1]["call_id"]
    items = [
        {"role": "developer", "content": "D"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "u"}]},
        {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "x"},
        *earlier,
        {"type": "function_call_output", "call_id": name, "output": [{"type": "input_text", "text": "sun"}]},
    ]
    more = {"tools": [WEATHER], "reasoning": {"effort": "low", "summary": "auto"}, "parallel_tool_calls": False}
    prompt = prompt_of(running, input=items, instructions="I", **more)
    call = f"[weather Rom {name}]"
    assert prompt == f"(system)I(system)Du(assistant)[Hm.]Look:{call}(tool)sun={name}lowweather"
    assert prompt_of(running, input=items[:2], **more, tool_choice="none") == "(system)Dulow"


@pytest.mark.parametrize(
    ("body", "guide"),
    [
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": PARAMETERS}}}, PARAMETERS),
        ({"text": {"format": {"type": "json_object"}, "verbosity": "low"}}, {"type": "object"}),
        ({"text": {"format": {"type": "text"}}}, None),
        ({"tools": [WEATHER], "tool_choice": "required"}, PARAMETERS),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "weather"}}, PARAMETERS),
    ],
)
def test_guides(running: Running, body: dict[str, Any], guide: Any) -> None:
    prompt_of(running, **body)
    assert running.device.seen[0].sampling.guide == guide


def test_a_demanded_call(running: Running) -> None:
    arguments = '{"place":"x"}'
    body = {"input": arguments, "tools": [WEATHER], "tool_choice": "required", "max_output_tokens": len(arguments)}
    (call,) = running.ask("/v1/responses", body).json()["output"]
    assert (call["type"], call["name"], call["arguments"]) == ("function_call", "weather", arguments)


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({}, "input", "must be given"),
        ({"input": []}, "input", "a list of items"),
        ({"input": "a", "previous_response_id": "resp_1"}, "previous_response_id", "no response is stored"),
        ({"input": "a", "conversation": "c"}, "conversation", "no response is stored"),
        ({"input": "a", "background": True}, "background", "at once"),
        ({"input": "a", "truncation": "auto"}, "truncation", "disabled"),
        ({"input": "a", "max_output_tokens": -1}, "max_output_tokens", "between"),
        ({"input": "a", "tools": [{"type": "web_search"}]}, "tools", "only functions"),
        ({"input": "a", "tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"input": "a", "text": {"format": {"type": "json_schema"}}}, "text.format", "schema"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "function_call_output"),
        ({"input": [{"role": "user"}]}, "input[0].content", "must be given"),
        ({"input": [{"type": "function_call", "name": "a", "arguments": "{}"}]}, "input[0].call_id", "must be given"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]},
            "input[0].content[0].type",
            "not supported",
        ),
        ({"input": "a" * 5000}, "input", "tokens"),
    ],
)
def test_what_is_refused(running: Running, body: dict[str, Any], param: str, message: str) -> None:
    answer = running.ask("/v1/responses", body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param and message in error["message"]


def test_an_answer_that_fails(running: Running) -> None:
    assert running.ask("/v1/responses", {"input": bytes(BAD).decode()}).status_code == 500
    last = events_of(running, input=bytes(BAD).decode())[-1]
    assert last["type"] == "response.failed" and last["response"]["error"]["code"] == "server_error"


def test_an_answer_without_text_has_a_message(running: Running) -> None:
    (item,) = running.ask("/v1/responses", {"input": "<", "stop": "<"}).json()["output"]
    assert item["content"] == [{"type": "output_text", "text": "", "annotations": [], "logprobs": []}]
    lacking = start(ServerConfig(), template=None)
    try:
        assert lacking.ask("/v1/responses", {"input": "a"}).json()["error"]["param"] == "input"
    finally:
        stop(lacking)
