"""Tools: they reach the chat template, calls are found in answers, also in streams; and reasoning is split off."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from served import Running, serving

from megajax.inference.sampling.guide import Guides
from megajax.server.chat.answer_parts import AnswerParts, AnswerStage, Part, Reasoning, WholeCalls
from megajax.server.chat.tools import CALL_FORMATS, call_format
from megajax.server.config import ServerConfig

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a place.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
}
TIME: dict[str, Any] = {"type": "function", "function": {"name": "time"}}
TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}[{{ c.function.name }} "
    "{{ c.function.arguments.place }}]{% endfor %}{% if m.role == 'tool' %}={{ m.tool_call_id }}{% endif %}{% endfor %}"
    "{% if tools %}{{ tools[0].function.name }}{% endif %}{# <tool_call> #}"
)
CALL = '<tool_call>\n{"name": "weather", "arguments": {"place": "Rom é"}}\n</tool_call>'
BEGIN, SEP = "<｜tool▁call", "<｜tool▁sep｜>"


def said(text: str) -> Part:
    return Part("content", text)


def thought(text: str) -> Part:
    return Part("reasoning", text)


def call(name: str, arguments: str = "{}") -> Part:
    return Part("call", arguments, name)


HERE = call("weather", '{"place": "Rom é"}')


def parts_of(stages: list[AnswerStage], text: str, size: int) -> list[Part]:
    """The joined parts of a text that arrives in pieces."""
    answer, joined = AnswerParts(stages), list[Part]()
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    for number, piece in enumerate(pieces, start=1):
        for part in answer.add(piece, last=number == len(pieces)):
            if joined and part.kind == joined[-1].kind != "call":
                part = Part(part.kind, joined.pop().text + part.text)
            joined.append(part)
    return joined


CALLS: dict[str, list[tuple[str, list[Part]]]] = {
    "hermes": [
        (CALL, [HERE]),
        (f"Well. \n{CALL}\n{CALL}", [said("Well."), HERE, HERE]),
        (f"{CALL} done <tool", [HERE, said("done <tool")]),
        (CALL.removesuffix("</tool_call>"), [HERE]),
        ("<tool_call>{x}</tool_call>", [said("<tool_call>{x}</tool_call>")]),
        (
            '<tool_call>{"name": "a", "arguments": {"b": "<tool_call>"}}\n<tool_call>{"name": "c"}</tool_call>',
            [call("a", '{"b": "<tool_call>"}'), call("c")],
        ),
        ("a <tool_call>{x", [said("a <tool_call>{x")]),
        (
            '<tool_call>{"name": "a", "arguments": {"b": "\\\\\\"</tool_call>"}}</tool_call> x',
            [call("a", '{"b": "\\\\\\"</tool_call>"}'), said("x")],
        ),
    ],
    "glm": [
        (
            "Well.\n<tool_call>typed\n<arg_key>text</arg_key>\n<arg_value>5</arg_value>\n<arg_key>count</arg_key>\n"
            "<arg_value>5</arg_value>\n<arg_key>on</arg_key>\n<arg_value>true</arg_value>\n</tool_call>",
            [said("Well."), call("typed", '{"text": "5", "count": 5, "on": true}')],
        ),
        (
            "<tool_call>typed<arg_key>text</arg_key><arg_value> a\n</tool_call></arg_value></tool_call>"
            "<tool_call>time</tool_call> x",
            [call("typed", '{"text": " a\\n</tool_call>"}'), call("time"), said("x")],
        ),
        (
            "<tool_call>any<arg_key>a</arg_key><arg_value>[1]</arg_value><arg_key>b</arg_key><arg_value>c</arg_value>",
            [call("any", '{"a": [1], "b": "c"}')],
        ),
        ("<tool_call>no call</tool_call> x", [said("<tool_call>no call</tool_call> x")]),
    ],
    "qwen_coder": [
        (
            "<tool_call>\n<function=typed>\n<parameter=text>\n5\n\n</parameter>\n<parameter=count>\n5\n</parameter>\n"
            "<parameter=on>\nTrue\n</parameter>\n<parameter=place>\nNone\n</parameter>\n</function>\n</tool_call>",
            [call("typed", '{"text": "5\\n", "count": 5, "on": true, "place": null}')],
        ),
        (
            "<tool_call>\n<function=typed>\n<parameter=text>\n</tool_call> <parameter=x>\n</parameter>\n</function>\n"
            "</tool_call>\n<tool_call>\n<function=time>\n</function>\n</tool_call>",
            [call("typed", '{"text": "</tool_call> <parameter=x>"}'), call("time")],
        ),
        ('<tool_call>{"name": "a"}</tool_call>', [said('<tool_call>{"name": "a"}</tool_call>')]),
    ],
    "llama3": [
        (
            '<|python_tag|>{"name": "a", "parameters": {"b": "<|python_tag|>"}}; <|python_tag|>{"name": "c"}',
            [call("a", '{"b": "<|python_tag|>"}'), call("c")],
        ),
        ('{"name": "weather", "parameters": {"place": "Rom é"}}', [HERE]),
        ('\n{"name": "weather", "parameters": {"place": "Rom é"}}; {"name": "a", "parameters": {}}', [HERE, call("a")]),
        ('{"place": 1}', [said('{"place": 1}')]),
        ('{"name": "a", "parameters', [said('{"name": "a", "parameters')]),
    ],
    "mistral": [
        ('[TOOL_CALLS] [{"name": "weather", "arguments": {"place": "Rom é"}}]', [HERE]),
        (
            'Well. [TOOL_CALLS][{"name": "weather", "arguments": {"place": "Rom é"}}, {"name": "a", "arguments": {}}]',
            [said("Well."), HERE, call("a")],
        ),
        ('[TOOL_CALLS]weather[ARGS]{"place": "Rom é"}[TOOL_CALLS]a[CALL_ID]x1[ARGS]{}\n', [HERE, call("a")]),
        (
            '[TOOL_CALLS]a[ARGS]{"b": "[TOOL_CALLS]"}[TOOL_CALLS]c[ARGS]{}',
            [call("a", '{"b": "[TOOL_CALLS]"}'), call("c")],
        ),
        ("[TOOL_CALLS]a[ARGS]{", [said("[TOOL_CALLS]a[ARGS]{")]),
        ("a [TOOL_CALLS]nope", [said("a [TOOL_CALLS]nope")]),
    ],
    "deepseek": [
        (
            f"Hm.\n\n{BEGIN}s▁begin｜>{BEGIN}▁begin｜>function{SEP}weather\n```json\n"
            f'{{"place": "Rom é"}}\n```{BEGIN}▁end｜>'
            f"\n{BEGIN}▁begin｜>function{SEP}a\n```json\n{{}}\n```{BEGIN}▁end｜>{BEGIN}s▁end｜>",
            [said("Hm."), HERE, call("a")],
        ),
        (f'{BEGIN}s▁begin｜>{BEGIN}▁begin｜>weather{SEP}{{"place": "Rom é"}}{BEGIN}▁end｜>{BEGIN}s▁end｜>', [HERE]),
        (
            f"{BEGIN}s▁begin｜>{BEGIN}▁begin｜>a{SEP}{{{BEGIN}▁end｜>{BEGIN}s▁end｜>b",
            [said(f"{BEGIN}s▁begin｜>{BEGIN}▁begin｜>a{SEP}{{{BEGIN}▁end｜>{BEGIN}s▁end｜>b")],
        ),
        (
            f'{BEGIN}s▁begin｜>{BEGIN}▁begin｜>a{SEP}{{"b": "{BEGIN}▁end｜>{BEGIN}s▁end｜>"}}'
            f"{BEGIN}▁end｜>{BEGIN}s▁end｜>",
            [call("a", f'{{"b": "{BEGIN}▁end｜>{BEGIN}s▁end｜>"}}')],
        ),
    ],
    "harmony": [
        ("<|channel|>final<|message|>Hi <b>.", [said("Hi <b>.")]),
        (
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I ask.<|end|>"
            "<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
            '{"place": "Rom é"}<|call|>',
            [thought("Hm."), said("I ask."), HERE],
        ),
        (
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant to=functions.weather<|channel|>commentary json"
            '<|message|>{"place": "Rom é"}',
            [thought("Hm."), HERE],
        ),
        ("<|channel|>analysis<|message|>Hm.<|end|><|start|>assis", [thought("Hm.")]),
        ("<|channel|>commentary to=functions.a<|message|>{x", [said("{x")]),
        (
            '<|channel|>commentary to=functions.a<|message|>{"b": "<|end|> <|call|>"}<|call|>',
            [call("a", '{"b": "<|end|> <|call|>"}')],
        ),
        ("Hi.", [said("Hi.")]),
    ],
}
"""Format -> texts and their parts."""
TYPED: dict[str, Any] = {
    "typed": {
        "properties": {
            "text": {"type": "string"},
            "count": {"$ref": "#/$defs/count"},
            "on": {"enum": [True, False]},
            "place": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
        "$defs": {"count": {"type": "integer"}},
    }
}
"""The schema of the arguments of a tool."""


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize(("name", "text", "parts"), [(name, *case) for name, cases in CALLS.items() for case in cases])
def test_calls_in_texts(name: str, text: str, parts: list[Part], size: int) -> None:
    assert parts_of([CALL_FORMATS[name](None, TYPED)], text, size) == parts


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize(
    ("text", "inside", "parts"),
    [
        ("<think>\nHm.</think>\n\nYes. ", False, [thought("Hm."), said("Yes. ")]),
        ("  Yes. ", False, [said("  Yes. ")]),
        (" \n", False, [said(" \n")]),
        ("Hm.</think>Yes", True, [thought("Hm."), said("Yes")]),
        ("Hm. </thin", True, [thought("Hm. </thin")]),
        ("<thinner> a <think>b</think>", False, [said("<thinner> a <think>b</think>")]),
        (f"<think>{CALL}</think>{CALL}", False, [thought(CALL), HERE]),
        ("<thi", False, [said("<thi")]),
    ],
)
def test_reasoning_in_texts(text: str, inside: bool, parts: list[Part], size: int) -> None:
    assert parts_of([Reasoning(inside=inside), CALL_FORMATS["hermes"](None)], text, size) == parts


def test_at_most_one_call() -> None:
    text = f"{CALL}{CALL}a"
    assert parts_of([CALL_FORMATS["hermes"](1)], text, 5) == [HERE, said("a")]


def test_formats_of_templates() -> None:
    assert call_format("{% if tools %}<tool_call>{% endif %}") == "hermes"
    assert call_format('Respond in the format {"name": name, "parameters": values}') == "llama3"
    assert call_format("{{ tools }} [TOOL_CALLS] ") == "mistral"
    assert call_format("{{ tools }}<｜tool▁calls▁begin｜>") == "deepseek"
    assert call_format('{{ tools }}<|start|>assistant<|channel|>commentary{# "parameters" #}') == "harmony"
    assert call_format("<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>") == "glm"
    assert call_format("<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>") == "qwen_coder"
    # Kimi K2, Cohere, Seed-OSS, Hunyuan.
    unknown = (
        "<|tool_calls_section_begin|>",
        '<|START_ACTION|> "parameters"',
        "<seed:tool_call><parameter=",
        "<tool_sep>",
    )
    for text in unknown:
        assert call_format("{{ tools }}" + text) is None


HARMONY = "{% for m in messages %}{{ m.thinking }}{{ m.content }}{% endfor %}{# <|channel|> {{ tools }} #}"


@pytest.mark.parametrize("stream", [False, True])
def test_channels_without_tools(stream: bool) -> None:
    text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes"

    def ask(**more: Any) -> tuple[str, str]:
        body: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": text}]}
        answer: Any = client.chat.completions.create(**body, max_tokens=len(text), stream=stream, **more)
        messages = [chunk.choices[0].delta for chunk in answer] if stream else [answer.choices[0].message]
        reasoning = "".join(getattr(message, "reasoning_content", "") for message in messages)
        return reasoning, "".join(message.content or "" for message in messages)

    with serving(ServerConfig(strict=True), template=HARMONY) as running:
        client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
        assert ask() == ("Hm.", "Yes")
        assert ask(extra_body={"separate_reasoning": False}) == ("", "Hm.Yes")
        # A guide holds from the first token on, so that there are no channels.
        assert ask(response_format={"type": "json_object"}) == ("", text)
        messages = [{"role": "assistant", "content": "c", "reasoning_content": "r"}]
        assert bytes(running.ask("/tokenize", {"messages": messages}).json()["tokens"]) == b"rc"


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_and_its_result(client: openai.OpenAI, stream: bool) -> None:
    text = f"<think>Hm.</think>Look: {CALL} "
    messages: Any = [{"role": "user", "content": text}]
    options: Any = {"model": "tiny", "messages": messages, "tools": [WEATHER], "max_tokens": len(text.encode())}
    if stream:
        events = list(client.chat.completions.create(**options, stream=True))
        deltas = [event.choices[0].delta for event in events]
        content = "".join(delta.content or "" for delta in deltas)
        reasoning = "".join(getattr(delta, "reasoning_content", "") for delta in deltas)
        ((call,),) = [delta.tool_calls for delta in deltas if delta.tool_calls]
        assert call.index == 0
    else:
        message = client.chat.completions.create(**options).choices[0].message
        content, reasoning = message.content or "", message.reasoning_content  # type: ignore[attr-defined]
        assert message.tool_calls
        (call,) = message.tool_calls
    assert (content, reasoning) == ("Look:", "Hm.")
    assert call.type == "function" and call.function and call.id
    assert (call.function.name, call.function.arguments) == ("weather", '{"place": "Rom é"}')


@pytest.mark.parametrize("more", [{"separate_reasoning": False}, {"regex": "(?s:.*)"}])
def test_reasoning_that_is_not_split(running: Running, more: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": "<think>a</think>!"}], "stop": "!"}
    message = running.ask("/v1/chat/completions", body | more).json()["choices"][0]["message"]
    assert message["content"] == "<think>a</think>" and "reasoning_content" not in message
    message = running.ask("/v1/chat/completions", body).json()["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("", "a")


def test_calls_end_with_their_own_reason(running: Running) -> None:
    """A stop string ends the answer after the call; without it, the reason is the length."""
    body = {"messages": [{"role": "user", "content": f"{CALL}!"}], "tools": [WEATHER], "stop": "!"}
    (choice,) = running.ask("/v1/chat/completions", body).json()["choices"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    (choice,) = running.ask("/v1/chat/completions", body | {"tool_choice": "none"}).json()["choices"]
    assert choice["finish_reason"] == "stop" and choice["message"]["content"] == CALL


def test_tools_and_calls_reach_the_template(running: Running) -> None:
    arguments = json.dumps({"place": "Rom"})
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "sun", "tool_call_id": "c1"},
    ]
    tokens = running.ask("/tokenize", {"messages": messages, "tools": [TIME]}).json()["tokens"]
    assert bytes(tokens) == b"u[weather Rom]sun=c1time"
    for invalid_call, place in (
        ({"function": {}}, ".function.name"),
        ({"function": {"name": "a", "arguments": "["}}, ".function.arguments"),
        ({"function": {"name": "a", "arguments": "[]"}}, ".function.arguments"),
        ({"function": 5}, ".function"),
        ({"type": "custom"}, ".type"),
        ({}, ".function"),
        (5, ""),
    ):
        bad = [*messages[:1], {"role": "assistant", "tool_calls": [call, invalid_call]}]
        running.refuses("/tokenize", {"messages": bad}, f"messages[1].tool_calls[1]{place}")
    empty = {"index": 0, "function": {"name": "weather", "arguments": ""}}
    body = {"messages": [{"role": "assistant", "tool_calls": [empty]}]}
    assert bytes(running.ask("/tokenize", body).json()["tokens"]) == b"[weather ]"
    running.refuses("/tokenize", {"messages": [{"role": "assistant"}]}, "messages[0].content")


@pytest.mark.parametrize(
    ("tools", "choice", "guide"),
    [
        ([WEATHER], "required", WEATHER["function"]["parameters"]),
        ([WEATHER, TIME], {"type": "function", "function": {"name": "time"}}, {"type": "object"}),
    ],
)
def test_a_demanded_call_is_guided(running: Running, tools: Any, choice: Any, guide: Any) -> None:
    arguments = '{"place":"x"}'
    body = {"messages": [{"role": "user", "content": arguments}], "tools": tools, "tool_choice": choice}
    body |= {"max_tokens": len(arguments)}
    (answer,) = running.ask("/v1/chat/completions", body).json()["choices"]
    assert running.device.seen[0].sampling.guide == guide
    (call,) = answer["message"]["tool_calls"]
    name = "weather" if choice == "required" else "time"
    assert call["function"] == {"name": name, "arguments": arguments}
    running.refuses("/v1/chat/completions", body | {"response_format": {"type": "json_object"}}, "tool_choice")


def test_the_guide_of_several_tools(running: Running) -> None:
    place = {"type": "object", "properties": {"x": {"anyOf": [{"$ref": "#/$defs/place"}, {"type": "null"}]}}}
    parameters = {"type": "object", "properties": {"place": {"$ref": "#/$defs/place"}}, "$defs": {"place": place}}
    weather = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
    body = {"messages": [{"role": "user", "content": "a"}], "tools": [weather, TIME], "tool_choice": "required"}
    assert running.ask("/v1/chat/completions", body | {"max_tokens": 1}).status_code == 200
    assert "maxItems" not in running.device.seen[0].sampling.guide
    state = Guides(lambda: [*(bytes((value,)) for value in range(256)), None], [256])(
        running.device.seen[0].sampling.guide
    )
    text = '[{"name":"time","parameters":{}},{"name":"weather","parameters":{"place":{"x":{"x":null}}}}]'
    for token in text.encode():
        state = state.after(token)
    assert state.complete
    assert [part.name for part in parts_of([WholeCalls(None)], text, 9)] == ["time", "weather"]
    body |= {"parallel_tool_calls": False, "max_tokens": 1}
    assert running.ask("/v1/chat/completions", body).status_code == 200
    assert running.device.seen[0].sampling.guide["maxItems"] == 1


def test_references_anchors_and_data_of_several_tools(running: Running) -> None:
    first = {
        "$defs": {"x": {"$anchor": "foo", "type": "integer"}, "enum": {"const": {"$ref": "#/x"}}},
        "properties": {"a": {"$ref": "#foo"}, "b": {"$ref": "#/$defs/enum"}},
        "required": ["a", "b"],
    }
    tools = [{"type": "function", "function": {"name": "first", "parameters": first}}, TIME]
    body = {"messages": [{"role": "user", "content": "a"}], "tools": tools, "tool_choice": "required", "max_tokens": 1}
    assert running.ask("/v1/chat/completions", body).status_code == 200
    guides = Guides(lambda: [*(bytes((value,)) for value in range(256)), None], [256])
    state = guides(running.device.seen[0].sampling.guide)
    for token in b'[{"name":"first","parameters":{"a":1,"b":{"$ref":"#/x"}}}]':
        state = state.after(token)
    assert state.complete
    body["tools"] = [*tools, {"type": "function", "function": {"name": "second", "parameters": first}}]
    running.refuses("/v1/chat/completions", body, "tools", "two tools have the $anchor 'foo'")


def test_guides_of_every_route_have_limits() -> None:
    """Other requests are answered meanwhile."""
    hard = {"type": "integer", "multipleOf": 399_989}
    tool = {"type": "function", "function": {"name": "a", "parameters": hard}}
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("guided_json", {"guided_json": hard}),
        ("response_format", {"response_format": {"type": "json_schema", "json_schema": {"schema": hard}}}),
        ("structured_outputs", {"structured_outputs": {"json": hard}}),
        ("tools", {"tools": [tool], "tool_choice": "required"}),
    ]
    config = ServerConfig(guide_bytes=2**24)
    guides = Guides(lambda: [*(bytes((value,)) for value in range(256)), None], [256], limits=config.guide_limits())
    with serving(config, guide=guides.start) as running:
        for param, body in bodies:
            running.refuses("/v1/chat/completions", chat | body, param, "server.guide_bytes")
        running.refuses("/v1/completions", {"prompt": "a", "guided_json": hard}, "guided_json", "server.guide_bytes")
        with ThreadPoolExecutor(4) as pool:
            busy = [guides.start(hard | {"multipleOf": 399_989 - 2 * number}) for number in range(1, 9)]
            answers = list(pool.map(lambda _: running.complete(prompt="a", max_tokens=1).status_code, range(20)))
            assert answers == [200] * 20 and not all(future.done() for future in busy)
            assert running.ask("/health", method="GET").status_code == 200


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"tools": [{"type": "function"}]}, "tools", ""),
        ({"tools": [{"type": "custom", "function": {"name": "a"}}]}, "tools", ""),
        ({"tools": [TIME, WEATHER, TIME]}, "tools", "two tools have the name 'time'"),
        ({"tools": [WEATHER], "tool_choice": "any"}, "tool_choice", ""),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "b"}}}, "tool_choice", ""),
        ({"tool_choice": "required"}, "tool_choice", ""),
        ({"functions": [{"name": "a"}]}, "functions", ""),
    ],
)
def test_invalid_tools(running: Running, body: dict[str, Any], param: str, words: str) -> None:
    running.refuses("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], **body}, param, words)
