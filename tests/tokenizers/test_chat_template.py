"""Texts of conversations, and the parts that the assistant wrote."""

import json
from datetime import datetime, tzinfo
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar

import numpy as np
import pytest
from user_errors import user_error

from megajax.tokenizers import chat_template
from megajax.tokenizers.base import Tokenizer
from megajax.tokenizers.chat_template import ChatTemplate, TemplateMisfit, TextPiece
from megajax.tokenizers.conversation import MarkedText


def messages_of(*contents: str) -> list[dict[str, str]]:
    """A system message, then questions and answers in turn."""
    roles = ("system", *("user", "assistant") * len(contents))
    return [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]


TALK = messages_of("Be brief.", "1+1?", "2", "2+2?", " 4 ")


@pytest.mark.parametrize(
    ("name", "text", "answers"),
    [
        ("identity", "Be brief.1+1?22+2? 4 ", ["2", " 4 "]),
        ("plain", "system: Be brief.\nuser: 1+1?\nassistant: 2\nuser: 2+2?\nassistant:  4 \n", ["2\n", " 4 \n"]),
        (
            "chatml",
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n2"
            "<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n 4 <|im_end|>\n",
            ["2<|im_end|>\n", " 4 <|im_end|>\n"],
        ),
        (
            "nemotron-h-aligned",
            "<SPECIAL_10>System\nBe brief.\n<SPECIAL_11>User\n1+1?\n<SPECIAL_11>Assistant\n2\n"
            "<SPECIAL_11>User\n2+2?\n<SPECIAL_11>Assistant\n4\n",
            ["2\n", "4\n"],
        ),
        (
            "nemotron-nano-v2",
            "<SPECIAL_10>System\nBe brief.\n<SPECIAL_11>User\n1+1?\n<SPECIAL_11>Assistant\n2\n<SPECIAL_12>\n"
            "<SPECIAL_11>User\n2+2?\n<SPECIAL_11>Assistant\n4\n<SPECIAL_12>\n",
            ["2\n<SPECIAL_12>\n", "4\n<SPECIAL_12>\n"],
        ),
    ],
)
def test_templates_by_name(name: str, text: str, answers: list[str]) -> None:
    template = ChatTemplate(name)
    parts = template.parts(TALK)
    assert template.render(TALK) == "".join(part.text for part in parts) == text
    assert [part.text for part in parts if part.weight] == answers


def test_templates_mark_answers_themselves() -> None:
    """Earlier thoughts are dropped, so the text of the first messages is not a prefix of the whole text."""
    dropping = (
        "{% for m in messages %}{% if m.role == 'user' %}U:{{ m.content }}{% else %}A:{% generation %}"
        "{{ m.content if loop.last else m.content.split('!')[1] }};{% endgeneration %}{% endif %}{% endfor %}"
    )
    talk = messages_of("", "a", "x!b", "c", "y!d")[1:]
    template = ChatTemplate(dropping)
    assert template.parts(talk) == [
        TextPiece("U:aA:", 0), TextPiece("b;", 1), TextPiece("U:cA:", 0), TextPiece("y!d;", 1), TextPiece("", 0)
    ]  # fmt: skip
    assert template.render(talk) == "U:aA:b;U:cA:y!d;"
    unmarked = ChatTemplate(dropping.replace("{% generation %}", "").replace("{% endgeneration %}", ""))
    with pytest.raises(TemplateMisfit, match=r"differently from the whole.*\{% generation %\}"):
        unmarked.parts(talk)


def test_limits_of_templates() -> None:
    refusing = "{% if messages[0].role != 'user' %}{{ raise_exception('begin with the user') }}{% endif %}"
    with pytest.raises(TemplateMisfit, match="begin with the user"):
        ChatTemplate(refusing).render(TALK)
    tools = ChatTemplate(
        "{{ tools | tojson }}|{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{% endfor %}"
    )
    assert tools.render(TALK, tools=[{"name": "é"}]) == '[{"name": "é"}]|'
    for text in ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "{% for a in b %}" * 30 + "{% endfor %}" * 30):
        with user_error("data.template"):
            ChatTemplate(text)


@pytest.mark.parametrize(
    "expression",
    ["messages.__class__.__mro__", "messages['__class__'].mro()", "(messages|attr('__class__')).mro()",
     "'{0.__class__.__mro__}'.format(messages)", "'{a.__class__.__mro__}'.format_map({'a': 1})",
     "messages.append.__self__", "messages.append(1)", "messages[0].update(a=1)", "cycler.__init__.__globals__"],
)  # fmt: skip
def test_templates_reach_no_attributes_of_python_and_change_nothing(expression: str) -> None:
    talk = [{**message} for message in TALK]
    with pytest.raises(TemplateMisfit, match="unsafe"):
        ChatTemplate("{{ " + expression + " }}").render(talk)
    assert talk == TALK


def test_json_is_that_of_hugging_face() -> None:
    """Jinja2's own filter escapes for HTML."""
    value = {"é": ["<a>", "'&'"], "a": 1}
    for arguments, expected in (
        ("", '{"é": ["<a>", "\'&\'"], "a": 1}'),
        ("true", '{"\\u00e9": ["<a>", "\'&\'"], "a": 1}'),
        ("indent=1", '{\n "é": [\n  "<a>",\n  "\'&\'"\n ],\n "a": 1\n}'),
        ("separators=(',', ':'), sort_keys=true", '{"a":1,"é":["<a>","\'&\'"]}'),
    ):
        assert ChatTemplate("{{ value | tojson(" + arguments + ") }}").render([], value=value) == expected


def test_the_time_is_that_of_the_rendering(monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock(datetime):
        times: ClassVar = [datetime(2026, 1, 2), datetime(2026, 1, 3)]

        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:
            return cls.times.pop(0)

    monkeypatch.setattr(chat_template, "datetime", Clock)
    template = ChatTemplate("{{ strftime_now('%d.%m.') }}")
    assert [template.render([]) for _ in range(2)] == ["02.01.", "03.01."]


def test_templates_in_files(tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text("{% for m in messages %}\n{{ m.content }};\n{% endfor %}\n")
    assert ChatTemplate(str(tmp_path / "chat.jinja")).render(TALK[:2]) == "Be brief.;\n1+1?;\n"
    config = {"chat_template": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}", "eos_token": "</s>"}
    config["bos_token"] = {"content": "<s>", "special": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert ChatTemplate(str(tmp_path / "tokenizer_config.json")).render(TALK) == "<s>Be brief.</s>"
    (tmp_path / "chat.jinja").write_text("{{ bos_token }}?")
    assert ChatTemplate(str(tmp_path / "chat.jinja")).render([]) == "<s>?", "those of the file beside it"
    config["chat_template"] = [{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert ChatTemplate(str(tmp_path / "tokenizer_config.json")).render(TALK) == "d"
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with user_error():
        ChatTemplate(str(tmp_path / "tokenizer_config.json"))


@pytest.mark.parametrize(
    "source",
    ["chatlm", "{% for %}"],
)
def test_invalid_templates(source: str) -> None:
    with user_error("data.template"):
        ChatTemplate(source)


class Pairs(Tokenizer):
    """A token for two equal letters, or for one."""

    eod, pad, identity, specials = 0, None, "pairs", MappingProxyType({})

    def encode(self, text: str) -> np.ndarray:
        ids: list[int] = []
        for letter in text:
            if ids and ids[-1] == ord(letter):
                ids[-1] += 1000
            else:
                ids.append(ord(letter))
        return np.array(ids, np.int32)

    def encode_spans(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        ids = self.encode(text)
        ends = np.cumsum(1 + ids // 1000)
        return ids, np.stack([np.append(0, ends[:-1]), ends], axis=1)


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([("ab", 0), ("cd", 1), ("e", 0)], [("a", 0), ("b", 0), ("c", 1), ("d", 1), ("e", 0)]),
        ([("ab", 0), ("bc", 1), ("d", 0)], [("a", 0), ("bb", 1), ("c", 1), ("d", 0)]),
        ([("a", 0), ("bc", 1), ("cd", 0)], [("a", 0), ("b", 1), ("cc", 0), ("d", 0)]),
        ([("ab", 0), ("b", 1), ("bd", 0)], [("a", 0), ("bb", 1), ("b", 0), ("d", 0)]),
    ],
)
def test_tokens_across_the_borders_of_answers(parts: list, expected: list) -> None:
    ids, weights = MarkedText(Pairs()).tokenize([TextPiece(*part) for part in parts])
    assert ids.tolist() == [ord(text[0]) + 1000 * (len(text) - 1) for text, _ in expected]
    assert weights.tolist() == [weight for _, weight in expected]


def test_messages_may_have_weights() -> None:
    """Templates may mark answers or not; a tag must mark each message of the assistant."""
    talk = [{**message} for message in TALK]
    answers = [message for message in talk if message["role"] == "assistant"]
    answers[0]["weight"], answers[-1]["weight"] = 0, 0.5
    marked = "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    for source in ("chatml", marked + "{% endif %}{% endfor %}"):
        assert [part.weight for part in ChatTemplate(source).parts(talk) if part.weight] == [0.5]
    with pytest.raises(TemplateMisfit, match="marks 1 answers of 2 messages of the assistant, which have weights"):
        ChatTemplate("{% generation %}{{ messages[0].content }}{% endgeneration %}").parts(talk)
