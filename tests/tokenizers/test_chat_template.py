"""Texts of conversations, and the parts that the assistant wrote."""

import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from megajax.config.errors import UserError
from megajax.config.read_limits import Limits, OverBudget
from megajax.data.chat.files import tokenize_parts
from megajax.tokenizers import template_sandbox
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


def test_limits_of_templates() -> None:
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


BIG = "{% set ns = namespace(a='aaaaaaaa') %}{% for _ in range(60) %}{% set ns.a = FORM %}{% endfor %}"
BOMBS = {
    "a product": "{{ 'a' * 10**10 }}",
    "a product of lists": "{{ [1] * 10**10 }}",
    "a product from the left": "{{ 10**10 * 'a' }}",
    "doubling by +": BIG.replace("FORM", "ns.a + ns.a"),
    "doubling by ~": BIG.replace("FORM", "ns.a ~ ns.a"),
    "doubling by join": BIG.replace("FORM", "[ns.a, ns.a]|join"),
    "doubling by a method": BIG.replace("FORM", "''.join([ns.a, ns.a])"),
    "doubling by a generator": BIG.replace("FORM", "''.join([ns.a, ns.a]|map('string'))"),
    "doubling by replace": BIG.replace("FORM", "ns.a.replace('a', 'aa')"),
    "doubling by the filter replace": BIG.replace("FORM", "ns.a|replace('a', 'aa')"),
    "doubling by format": BIG.replace("FORM", "'{0}{0}'.format(ns.a)"),
    "doubling by %": BIG.replace("FORM", "'%(a)s%(a)s' % {'a': ns.a}"),
    "doubling by the filter format": BIG.replace("FORM", "'%s%s'|format(ns.a, ns.a)"),
    "doubling by a macro": "{% macro m(a) %}{{ a }}{{ a }}{% endmacro %}" + BIG.replace("FORM", "m(ns.a)"),
    "doubling by a macro of constants": "{% macro m() %}" + "a" * 1000 + "{% endmacro %}"
    "{% for i in range(1000) %}{% for j in range(1000) %}{{ m() }}{% endfor %}{% endfor %}",
    "nested lists": BIG.replace("FORM", "[ns.a, ns.a]") + "{{ ns.a }}",
    "nested lists that are compared": BIG.replace("FORM", "[ns.a, ns.a]") + "{{ ns.a == ns.a }}",
    "nested tuples as a key": BIG.replace("FORM", "(ns.a, ns.a)") + "{{ {ns.a: 1} }}",
    "nested mappings": BIG.replace("FORM", "dict(a=ns.a, b=ns.a)"),
    "nested views": BIG.replace("FORM", "{1: ns.a, 2: ns.a}.items()"),
    "tojson of nested lists": BIG.replace("FORM", "[ns.a, ns.a]") + "{{ ns.a|tojson }}",
    "tojson with an indent": "{{ messages|tojson(indent=10**9) }}",
    "tojson with separators": BIG.replace("FORM", "messages|tojson(separators=(ns.a, ns.a))"),
    "center": "{{ 'a'.center(10**10) }}",
    "zfill": "{{ 'a'.zfill(10**10) }}",
    "the filter center": "{{ 'a'|center(10**10) }}",
    "indent": "{{ 'a'|indent(10**10, true) }}",
    "indent by a text": "{{ ('a\n' * 10**5)|indent('a' * 10**5) }}",
    "expandtabs": "{{ ('\t' * 10**4).expandtabs(tabsize=10**6) }}",
    "a width": "{{ '{:10000000000}'.format(1) }}",
    "a width from a value": "{{ '{:{w}}'.format(1, w=10**10) }}",
    "a width of %": "{{ '%10000000000d' % 1 }}",
    "a width of % from a value": "{{ '%*d' % (10**10, 1) }}",
    "format_map": "{{ '{a:10000000000}'.format_map({'a': 1}) }}",
    "a power": "{{ 10 ** (10 ** 7) }}",
    "a power of powers": "{% set ns = namespace(a=10) %}{% for _ in range(60) %}"
    "{% set ns.a = ns.a * ns.a %}{% endfor %}",
    "digits": "{{ 5|round(-10**9) }}",
    "bytes of a number": "{{ (5).to_bytes(10**10) }}",
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops with output": "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",
    "tests of a filter": "{{ range(9999)|select('odd')|list }}",
    "a list that grows": "{% set ns = namespace(a=[1] * 10**5) %}{% for _ in range(4000) %}"
    "{% set ns.a = ns.a + [1] %}{% endfor %}",
    "a macro that calls itself twice": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}"
    "{{ m(60) }}",
    "a recursive loop": "{% for a in [1, 1] recursive %}"
    "{% if loop.depth < 60 %}{{ loop([1, 1]) }}{% endif %}{% endfor %}",
    "slices": "{% set a = 'a' * 10**7 %}{% for _ in range(10**5) %}{% set b = a[1:] %}{% endfor %}",
    "a split": "{% for _ in range(10) %}{% set b = ('a ' * 10**7).split() %}{% endfor %}",
    "a search from the end": "{{ ('a' * 10**6).rfind('b' + 'a' * 10**5) }}",
    "strip": "{{ ('a' * 10**6).strip('b' * 10**6 + 'a') }}",
    "the filter trim": "{{ ('a' * 10**6)|trim('b' * 10**6 + 'a') }}",
    "translate": "{{ ('a' * 10**5).translate({97: 'a' * 10**5}) }}",
    "batch": "{{ [1]|batch(10**10, 'a')|list }}",
    "slice": "{{ [1]|slice(10**10, 'a')|list }}",
    "the text of a filter": "{% filter replace('a', 'a' * 10**6) %}" + "a" * 1000 + "{% endfilter %}",
    "lists of lists in a sum": "{{ ([[1]] * 10**3)|sum(start=[])|length }}",
}  # fmt: skip


@pytest.mark.parametrize("kind", BOMBS)
def test_a_template_that_takes_too_long_or_makes_too_long_a_text_is_refused(kind, monkeypatch):
    monkeypatch.setattr(template_sandbox, "RENDERING", Limits(entries=5_000, bytes=2**24, depth=100))
    tracemalloc.start()
    try:
        with pytest.raises((OverBudget, TemplateMisfit), match=r"refused|refuses|supported|bits|digits|width"):
            ChatTemplate(BOMBS[kind]).render([{"role": "user", "content": "text"}])
        assert tracemalloc.get_traced_memory()[1] < 2**28
    finally:
        tracemalloc.stop()


def test_templates_beyond_a_limit_name_themselves_and_the_remedy(monkeypatch):
    monkeypatch.setattr(template_sandbox, "RENDERING", Limits(entries=1000))
    with pytest.raises(
        OverBudget, match=r"data\.template='.*': refused: 1,001 entries, at most .* MEGAJAX_READ_LIMITS"
    ):
        ChatTemplate(BOMBS["loops"]).render([])
    with pytest.raises(OverBudget, match="refused: 300,002 bytes"):
        ChatTemplate("{}" + "a" * 300_000)
    for text in ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "{% for a in b %}" * 30 + "{% endfor %}" * 30):
        with pytest.raises(UserError, match="not a Jinja2 template"):
            ChatTemplate(text)
    for name in ("lipsum()", "'a'|urlize", "'a'|striptags", "'a'|pprint"):
        with pytest.raises((UserError, TemplateMisfit), match=r"undefined|No filter"):
            ChatTemplate("{{ " + name + " }}").render([])


def test_a_bounded_rendering_equals_that_of_jinja():
    """For the constructs in templates of published models."""
    source = """{%- set ns = namespace(last=0, text='') -%}
{%- for m in messages[1:] -%}{%- set ns.last = loop.index0 -%}{%- endfor -%}
{%- macro item(name, value=none) %}<{{ name }}{{ '=' ~ value if value is not none else '' }}>{% endmacro -%}
{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | join(' | ') }}
{%- for role, group in messages | groupby('role') %}[{{ role }}: {{ group | length }}]{% endfor %}
{%- for m in messages if m.role != 'system' %}
{%- set content = m.content.split('</t>')[-1].lstrip('\\n') %}
{{- loop.index ~ '/' ~ loop.length }} {{ item(m.role, loop.first) }}{{ content | trim | upper }}
{%- if loop.previtem is defined and not loop.last %},{% endif %}
{%- set ns.text = ns.text + content %}
{%- endfor %}
{{ 'é' | tojson(ensure_ascii=false) }}{{ 'é' | tojson(true) }}
{{ messages | tojson }} {{ messages[0] | tojson(indent=2) }} {{ '%s-%05.2f' % ('a', 1.5) }} {{ '{:>5}'.format('b') }}
{%- for key, value in {'b': [1, (2, 3)], 'a': none}.items() | sort %}{{ key }}{{ value }}{% endfor %}
{{ ns.text[::-1] }}{{ ns.last }}{{ ['x'] + ['y'] }}{{ 2 ** 10 + 7 % 4 }}{{ {'a': 1} | dictsort }}{{ undefined_name }}
{%- for a in [[1, [2]]] recursive %}{{ a if a is number else loop(a) }}{% endfor %}
{{- "a\\nb" | indent(2) }}{{ 'x' in messages[0].content }}{{ -1 | abs }}{{ 'a,b'.split(',') | list | length }}"""
    messages = [
        {"role": role, "content": content}
        for role, content in (("system", "be x"), ("user", "<t>a</t>\nb"), ("assistant", "c d"), ("user", "e"))
    ]
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    plain.filters["tojson"] = lambda value, ensure_ascii=False, indent=None: json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent
    )
    assert ChatTemplate(source).render(messages) == plain.from_string(source).render(messages=messages)


@pytest.mark.parametrize(
    "expression",
    [
        "messages|length",  # Qwen3
        "messages[loop.index0:]|length",  # gpt-oss
        "messages[-1].get('content')|default('')|length",
        "messages|selectattr('role', 'equalto', 'tool')|list|length",
        "(messages + [m])|length",
    ],
)
def test_text_counts_only_where_it_is_copied(expression: str, monkeypatch):
    """Templates of published models read the whole conversation for each of its messages."""
    monkeypatch.setattr(template_sandbox, "RENDERING", Limits(entries=200_000, bytes=2**22, depth=100))
    messages = messages_of(*["a" * 5000] * 200)
    source = "{% for m in messages %}{{ " + expression + " }} {{ m.content }}{% endfor %}"
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    assert ChatTemplate(source).render(messages) == plain.from_string(source).render(messages=messages)
