"""Text of conversations, by Jinja2 templates as Hugging Face's tokenizers have them."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from megajax.config.errors import UserError
from megajax.config.missing import require

NAMED = {
    "plain": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}",
    "chatml": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "identity": "{% for m in messages %}{{ m.content }}{% endfor %}",
    # Two formats of Megatron-LM. The first has the answer's header at the end of the question.
    "nemotron-h-aligned": "{% for m in messages %}{% set text = m.content.strip() + '\n' %}"
    "{% if m.role == 'system' %}<SPECIAL_10>System\n{{ text }}"
    "{% elif m.role == 'user' %}<SPECIAL_11>User\n{{ text }}<SPECIAL_11>Assistant\n"
    "{% elif m.role == 'assistant' %}{{ text }}{% endif %}{% endfor %}",
    "nemotron-nano-v2": "{% for m in messages %}"
    "{% set text = m.content.replace('/think', '').replace('/no_think', '').strip() + '\n' %}"
    "{% if m.role == 'system' %}<SPECIAL_10>System\n{{ text }}"
    "{% elif m.role == 'user' %}<SPECIAL_11>User\n{{ text }}"
    "{% elif m.role == 'assistant' %}<SPECIAL_11>Assistant\n{{ m.content.strip() }}\n<SPECIAL_12>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<SPECIAL_11>Assistant\n{% endif %}",
}
"""Templates by name."""

BEGIN, END = "\ufdd0", "\ufdd1"
"""Around what {% generation %} marks; Unicode reserves these characters for a program's own use."""

type Messages = Sequence[Mapping[str, Any]]


class Part(NamedTuple):
    """A piece of a conversation's text."""

    text: str
    weight: float
    """Of its tokens in the loss: 1 for what the assistant wrote, unless its message says another; 0 for the rest."""


def weight_of(message: Mapping[str, Any]) -> float:
    """Weight of an answer's tokens in the loss."""
    return float(message.get("weight", 1))


def _weights_of_marks(messages: Messages, marks: int) -> list[float]:
    """Of the answers that a template marks. Raises TemplateMisfit where they are not the assistant's messages, one by
    one, and these have weights."""
    weights = [weight_of(message) for message in messages if message["role"] == "assistant"]
    if len(weights) == marks:
        return weights
    if any(weight != 1 for weight in weights):
        raise TemplateMisfit(
            f"the chat template marks {marks} answers of {len(weights)} messages of the assistant, which have weights"
        )
    return [1.0] * marks


class TemplateMisfit(Exception):
    """A conversation that the template refuses or renders in a way that does not show its answers."""


class ChatTemplate:
    """A template of conversations.

    Args:
        source: a template (it has a brace), the path of one or of a tokenizer_config.json, or a name of `NAMED`.
        setting: where `source` was given, for messages.

    Attributes:
        identity: equal for equal templates, for the keys of caches.

    Raises:
        UserError: no such name or file, or a template with a mistake.
    """

    def __init__(self, source: str, setting: str = "data.template"):
        require("jinja2", "A chat template")
        from jinja2 import TemplateError

        text, names = _read(source, setting)
        self.identity = json.dumps([text, names], sort_keys=True)
        self._marked = "endgeneration" in text
        try:
            self._template = _environment().from_string(text, names)
        except TemplateError as error:
            line = getattr(error, "lineno", None)
            where = f"line {line}: " if line else ""
            raise UserError(f"{setting}={_shown(source)}: not a Jinja2 template: {where}{error}.") from error

    def render(self, messages: Messages, *, prompt: bool = False, **more: Any) -> str:
        """The text of messages. prompt: with the header of an answer at its end, if the template has one.

        Raises:
            TemplateMisfit: the template refuses them.
        """
        return self._rendered(messages, prompt, more).replace(BEGIN, "").replace(END, "")

    def _rendered(self, messages: Messages, prompt: bool, more: Mapping[str, Any]) -> str:
        """The same with the marks of {% generation %}."""
        from jinja2 import TemplateError

        try:
            return self._template.render(messages=messages, add_generation_prompt=prompt, **more)
        except (
            TemplateError,
            TypeError,
            ValueError,
            AttributeError,
            LookupError,
            ArithmeticError,
            RuntimeError,
        ) as error:
            raise TemplateMisfit(f"the chat template refuses this conversation: {error}") from error

    def parts(self, messages: Messages, **more: Any) -> list[Part]:
        """The text of a conversation, in pieces. An answer is what {% generation %} marks; without that tag, what an
        assistant's message adds to the text of those before it and the header of an answer.

        Raises:
            TemplateMisfit: as `render`; or the text of the first messages is not the beginning of the whole text.
        """
        text = self._rendered(messages, False, more)
        if self._marked:
            if any(mark in str(message["content"]) for message in messages for mark in (BEGIN, END)):
                raise TemplateMisfit("it has the characters U+FDD0 or U+FDD1, which mark answers within a template")
            first, *others = [piece.partition(END) for piece in text.split(BEGIN)]
            marked = zip(others, _weights_of_marks(messages, len(others)), strict=True)
            pairs = [(Part(answer, weight), Part(rest, 0)) for (answer, _, rest), weight in marked]
            return [Part(first[0], 0), *(part for pair in pairs for part in pair)]
        parts, done = [], 0
        for place, message in enumerate(messages):
            if message["role"] == "assistant":
                begin = self._answer_begins(text, messages[:place], more)
                rest = messages[place + 1 :]
                end = self._length(text, self.render(messages[: place + 1], **more)) if rest else len(text)
                parts += [Part(text[done:begin], 0), Part(text[begin:end], weight_of(message))]
                done = end
        return [*parts, Part(text[done:], 0)]

    def _answer_begins(self, text: str, before: Messages, more: Mapping[str, Any]) -> int:
        if not before:
            return 0
        prompt = self.render(before, prompt=True, **more)
        return len(prompt) if text.startswith(prompt) else self._length(text, self.render(before, **more))

    def _length(self, text: str, beginning: str) -> int:
        if not text.startswith(beginning):
            raise TemplateMisfit(
                "the chat template renders the first messages of this conversation differently from the whole, so "
                "the answers cannot be told from the prompts: mark them in the template with {% generation %} … "
                "{% endgeneration %}, or set data.loss=all"
            )
        return len(beginning)


def _read(source: str, setting: str) -> tuple[str, dict[str, str]]:
    """A template's text, and the special tokens that its file names."""
    if "{" in source:
        return source, {}
    if source in NAMED:
        return NAMED[source], {}
    try:
        text = Path(source).read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        known = f"neither {', '.join(NAMED)}, nor a template with braces, nor a file that can be read"
        raise UserError(f"{setting}={source!r} is {known} ({error}).") from error
    if not source.endswith(".json"):
        return text, _named_tokens(Path(source).with_name("tokenizer_config.json"))
    try:
        settings = json.loads(text)
        template = settings["chat_template"]
        named = template if isinstance(template, str) else {one["name"]: one["template"] for one in template}["default"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{source}: no chat template: expected the key chat_template of a tokenizer_config.json; newer models have "
            "it in a file chat_template.jinja."
        ) from error
    return named, _names(settings)


def _named_tokens(path: Path) -> dict[str, str]:
    """Special tokens that the tokenizer_config.json beside a template names; none without such a file."""
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return _names(settings) if isinstance(settings, dict) else {}


def _names(settings: Mapping[str, Any]) -> dict[str, str]:
    tokens = {name: settings.get(name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    content = {name: token.get("content") if isinstance(token, dict) else token for name, token in tokens.items()}
    return {name: token for name, token in content.items() if isinstance(token, str)}


def _shown(source: str) -> str:
    return repr(source if len(source) <= 60 else f"{source[:60]}…")


def _environment() -> Any:
    """Jinja2 with what Hugging Face's templates use; in a sandbox, for templates come with other people's models."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %} … {% endgeneration %} around what the assistant writes."""

        tags = {"generation"}  # noqa: RUF012 as the base class has it

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_between"), [], [], body).set_lineno(line)

        def _between(self, caller: Any) -> str:
            return f"{BEGIN}{caller()}{END}"

    def refuse(message: str) -> NoReturn:
        raise TemplateError(message)

    def to_json(value: Any, indent: int | None = None, **more: Any) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent, **more)

    made: Any = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    made.filters["tojson"] = to_json
    made.globals.update(raise_exception=refuse, strftime_now=lambda form: datetime.now().strftime(form))
    return made
