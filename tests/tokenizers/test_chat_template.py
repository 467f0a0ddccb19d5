"""Text of conversations and which of it the assistant wrote."""

import json
from pathlib import Path

import numpy as np
import pytest

from megajax.config.errors import UserError
from megajax.data.chat_files import tokenize_parts
from megajax.tokenizers.chat_template import ChatTemplate, Part, TemplateMisfit


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
        Part("U:aA:", 0), Part("b;", 1), Part("U:cA:", 0), Part("y!d;", 1), Part("", 0)
    ]  # fmt: skip
    assert template.render(talk) == "U:aA:b;U:cA:y!d;"
    unmarked = ChatTemplate(dropping.replace("{% generation %}", "").replace("{% endgeneration %}", ""))
    with pytest.raises(TemplateMisfit, match=r"differently from the whole.*\{% generation %\}"):
        unmarked.parts(talk)
    with pytest.raises(TemplateMisfit, match=r"U\+FDD0"):
        template.parts(messages_of("", "a", "\ufdd0!b")[1:])


def test_what_a_template_may_do() -> None:
    refusing = "{% if messages[0].role != 'user' %}{{ raise_exception('begin with the user') }}{% endif %}"
    with pytest.raises(TemplateMisfit, match="begin with the user"):
        ChatTemplate(refusing).render(TALK)
    tools = ChatTemplate(
        "{{ tools | tojson }}|{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{% endfor %}"
    )
    assert tools.render(TALK, tools=[{"name": "é"}]) == '[{"name": "é"}]|'
    with pytest.raises(TemplateMisfit, match="unsafe"):
        ChatTemplate("{{ messages.__class__.__mro__ }}").render(TALK)
    with pytest.raises(TemplateMisfit):
        ChatTemplate("{{ messages.append(1) }}").render(TALK)


def test_templates_in_files(tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text("{% for m in messages %}\n{{ m.content }};\n{% endfor %}\n")
    assert ChatTemplate(str(tmp_path / "chat.jinja")).render(TALK[:2]) == "Be brief.;\n1+1?;\n"
    config = {"chat_template": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}", "eos_token": "</s>"}
    config["bos_token"] = {"content": "<s>", "special": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert ChatTemplate(str(tmp_path / "tokenizer_config.json")).render(TALK) == "<s>Be brief.</s>"
    config["chat_template"] = [{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert ChatTemplate(str(tmp_path / "tokenizer_config.json")).render(TALK) == "d"
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(UserError, match=r"no chat template.*chat_template\.jinja"):
        ChatTemplate(str(tmp_path / "tokenizer_config.json"))


@pytest.mark.parametrize(
    ("source", "message"),
    [("chatlm", "'chatlm' is neither plain, chatml"), ("{% for %}", "not a Jinja2 template: line 1")],
)
def test_invalid_templates(source: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        ChatTemplate(source)


class Pairs:
    """A token for two equal letters, or for one."""

    eod, pad, identity = 0, None, "pairs"

    def encode(self, text: str) -> np.ndarray:
        ids: list[int] = []
        for letter in text:
            if ids and ids[-1] == ord(letter):
                ids[-1] += 1000
            else:
                ids.append(ord(letter))
        return np.array(ids, np.int32)


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
    ids, weights = tokenize_parts(Pairs(), [Part(*part) for part in parts])
    assert ids.tolist() == [ord(text[0]) + 1000 * (len(text) - 1) for text, _ in expected]
    assert weights.tolist() == [weight for _, weight in expected]


def test_messages_may_have_weights() -> None:
    """With a template that marks answers and one that does not; the tag must mark each message of the assistant."""
    talk = [{**message} for message in TALK]
    answers = [message for message in talk if message["role"] == "assistant"]
    answers[0]["weight"], answers[-1]["weight"] = 0, 0.5
    marked = "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    for source in ("chatml", marked + "{% endif %}{% endfor %}"):
        assert [part.weight for part in ChatTemplate(source).parts(talk) if part.weight] == [0.5]
    with pytest.raises(TemplateMisfit, match="marks 1 answers of 2 messages of the assistant, which have weights"):
        ChatTemplate("{% generation %}{{ messages[0].content }}{% endgeneration %}").parts(talk)
