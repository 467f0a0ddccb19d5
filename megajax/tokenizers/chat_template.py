"""Text of conversations, from Jinja2 templates as in Hugging Face's tokenizers."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from megajax.config.errors import UserError
from megajax.config.optional_packages import require
from megajax.config.read_limits import parse_json, read_file, utf8_text
from megajax.tokenizers.folder import ADDITIONAL, TEMPLATE, FolderTokens

CUT = "\ufdd3"
"""Stands for the content of a message to find its place in a text; reserved for internal use like BEGIN and END."""
BEGIN, END = "\ufdd0", "\ufdd1"
"""Delimit the text in {% generation %} blocks; Unicode reserves these characters for internal use."""

TEMPLATES = {
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

TOOL_USE = "tool_use"
"""The name of the template that transformers takes for messages with tools, if there is one."""

type Messages = Sequence[Mapping[str, Any]]


class TextPiece(NamedTuple):
    """A piece of a conversation's text."""

    text: str
    weight: float
    """Weight of its tokens in the loss: for answers 1 or the weight of the message, 0 for other text."""


def weight_of(message: Mapping[str, Any]) -> float:
    """Weight of an answer's tokens in the loss."""
    return float(message.get("weight", 1))


class TemplateMisfit(Exception):
    """A conversation that the template rejects, or whose answers cannot be found in the rendered text."""


NOT_FOUND = (
    "the chat template renders the first messages of this conversation differently from the whole, so answers cannot "
    "be separated from prompts: mark them in the template with {% generation %} … {% endgeneration %}, or set "
    "data.loss=all"
)


class ChatTemplate:
    """A template of conversations.

    Args:
        source: a template (any text with a brace), the path of one or of a tokenizer_config.json, or a name of
            `TEMPLATES`.
        setting: the setting of `source`, for messages.

    Attributes:
        identity: equal for equal templates, for the keys of caches.
        text: the template.

    Raises:
        UserError: no such name or file, or an invalid template.
    """

    def __init__(self, source: str, setting: str = "data.template"):
        require("jinja2", "A chat template")
        from jinja2 import TemplateError

        where = f"{setting}={source if len(source) <= 60 else f'{source[:60]}…'!r}"
        self.text, names, of_tools = _read(source, setting)
        self.identity = json.dumps([self.text, names, *([] if of_tools is None else [of_tools])], sort_keys=True)
        self._marked = "endgeneration" in self.text
        try:
            self._template = _sandbox().from_string(self.text, names)
            self._of_tools = self._template if of_tools is None else _sandbox().from_string(of_tools, names)
        except (TemplateError, RecursionError, SyntaxError, MemoryError, ValueError) as error:
            line = getattr(error, "lineno", None)
            location = f"line {line}: " if line else ""
            raise UserError(f"{where}: not a Jinja2 template: {location}{error}.") from error

    def render(self, messages: Messages, *, prompt: bool = False, **more: object) -> str:
        """The text of messages. prompt: append the header of an answer, if the template has one.

        Raises:
            TemplateMisfit: the template rejects the messages.
        """
        return self._render_marked(messages, prompt, more).replace(BEGIN, "").replace(END, "")

    def _render_marked(self, messages: Messages, prompt: bool, more: Mapping[str, Any]) -> str:
        """The text of messages, with marks around {% generation %} blocks; see `render`."""
        from jinja2 import TemplateError

        try:
            # No tools are no list of tools, as in transformers.
            absent = {name: more.get(name) or None for name in ("tools", "documents")}
            template = self._template if absent["tools"] is None else self._of_tools
            return template.render({"messages": messages, "add_generation_prompt": prompt, **more, **absent})
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

    def parts(self, messages: Messages, **more: object) -> list[TextPiece]:
        """The text of a conversation, in pieces: other text and an answer in turn, then other text. Answers are the
        {% generation %} blocks. Without that tag, an answer is the text that a message of the assistant adds after the
        earlier messages and the header of an answer: its content, and what the template writes to end it.

        Raises:
            TemplateMisfit: as `render`; or answers cannot be found in the text.
        """
        text = self._render_marked(messages, False, more)
        if self._marked:
            first, *pieces = [piece.partition(END) for piece in text.split(BEGIN)]
            weights = [weight_of(message) for message in messages if message["role"] == "assistant"]
            if len(weights) != (marks := len(pieces)):
                if set(weights) - {1}:
                    count = f"{marks} answers of {len(weights)} messages of the assistant"
                    raise TemplateMisfit(f"the chat template marks {count}, which have weights")
                weights = [1.0] * marks
            marked = zip(pieces, weights, strict=True)
            pairs = [(TextPiece(answer, weight), TextPiece(rest, 0)) for (answer, _, rest), weight in marked]
            return [TextPiece(first[0], 0), *(part for pair in pairs for part in pair)]
        parts, end_before = [], 0
        for place, message in enumerate(messages):
            if message["role"] == "assistant":
                begin = self._answer_begins(text, messages, place, more)
                end = self._answer_ends(text, messages, place, more)
                if not end_before <= begin <= end:
                    raise TemplateMisfit(NOT_FOUND)
                parts += [TextPiece(text[end_before:begin], 0), TextPiece(text[begin:end], weight_of(message))]
                end_before = end
        return [*parts, TextPiece(text[end_before:], 0)]

    def learned_header(self) -> str:
        """What a template without a header of answers for prompts writes before an answer, which the model learns."""
        header, before, _ = self._frame
        return "" if self._marked or header or not before.strip() else before

    def _answer_begins(self, text: str, messages: Messages, place: int, more: Mapping[str, Any]) -> int:
        """The end of the prompt of a message. If the whole text does not begin with the prompt, as for the first
        message, that of the header before the content."""
        if place and (length := self._shared(text, messages[:place], more, prompt=True)):
            return length
        head, _ = self._around(text, messages, place, more)
        header, lead, _ = self._frame
        # What the earlier messages contain is not searched for the header; the template's own text may contain it too.
        least = len(text) - len(self._around(text, messages, place - 1, more)[1]) if place else 0
        place_of_header = head.rfind(header, least) if header else -1
        lead = lead if place and not header and head.endswith(lead) else ""
        begin = len(head) - len(lead) if place_of_header < 0 else place_of_header + len(header)
        if not text.startswith(head[:begin]):
            raise TemplateMisfit(NOT_FOUND)
        return begin

    def _answer_ends(self, text: str, messages: Messages, place: int, more: Mapping[str, Any]) -> int:
        """The end of the text of the first messages. If the whole text does not begin with it, that of the text after
        the content of the last one."""
        if place == len(messages) - 1:
            return len(text)
        if length := self._shared(text, messages[: place + 1], more):
            return length
        end, after = len(text) - len(self._around(text, messages, place, more)[1]), self._frame[2]
        return end + len(after) * text.startswith(after, end)

    def _shared(self, text: str, messages: Messages, more: Mapping[str, Any], *, prompt: bool = False) -> int:
        """Length of the text of the first messages; 0 if the whole text does not begin with it, or there is none."""
        try:
            beginning = self.render(messages, prompt=prompt, **more)
        except TemplateMisfit:
            return 0
        return len(beginning) * text.startswith(beginning)

    def _around(self, text: str, messages: Messages, place: int, more: Mapping[str, Any]) -> tuple[str, str]:
        """The text before the content of a message, and the rest of the text after it.

        Raises TemplateMisfit if the template does not show the content, or other text depends on it."""
        shell = [*messages[:place], {**messages[place], "content": CUT}, *messages[place + 1 :]]
        head, cut, tail = self.render(shell, **more).partition(CUT)
        if not cut or CUT in tail or CUT in text or not text.endswith(tail):
            raise TemplateMisfit(NOT_FOUND)
        return head, tail

    @cached_property
    def _frame(self) -> tuple[str, str, str]:
        """(The header of an answer for prompts, the text between a prompt and the content, the text after it) in a
        conversation of a question and an answer; empty for a template that refuses it."""
        question, answer = {"role": "user", "content": "?"}, {"role": "assistant", "content": CUT}
        try:
            before, prompt = (self.render([question], prompt=header) for header in (False, True))
            head, _, after = self.render([question, answer]).partition(CUT)
        except TemplateMisfit:
            return "", "", ""
        return prompt.removeprefix(before), head.removeprefix(prompt) if head.startswith(prompt) else "", after


def _sandbox() -> Any:
    """Jinja2's sandbox as Hugging Face's templates expect it. Time and memory of a rendering are not limited."""
    # Only chat templates need Jinja2.
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """The tag {% generation %}, around the answers of the assistant."""

        tags = {"generation"}  # noqa: RUF012 as the base class has it

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

        def _mark(self, caller: Any) -> str:
            return f"{BEGIN}{caller()}{END}"

    def refuse(message: str) -> NoReturn:
        raise TemplateError(message)

    sandbox = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    sandbox.filters["tojson"] = _to_json
    functions: dict[str, Any] = {"raise_exception": refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
    sandbox.globals |= functions
    return sandbox


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **more: Any) -> str:
    """As in Hugging Face's templates, which do not escape for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **more)


def is_missing(source: str) -> bool:
    """Whether the source of a template is the path of a file that does not exist; see `ChatTemplate`."""
    return "{" not in source and source not in TEMPLATES and not Path(source).is_file()


def template_text(source: str) -> str:
    """The text of a template; see `ChatTemplate`. Raises UserError."""
    return _read(source, "data.template")[0]


def _read(source: str, setting: str) -> tuple[str, dict[str, str], str | None]:
    """A template's text, the special tokens of its folder, and another template for messages with tools."""
    if "{" in source:
        return source, {}, None
    if source in TEMPLATES:
        return TEMPLATES[source], {}, None
    try:
        text = utf8_text(read_file(source), f"{setting}={source}")
    except OSError as error:
        choices = f"neither {', '.join(TEMPLATES)}, nor a template with braces, nor a file that can be read"
        raise UserError(f"{setting}={source!r} is {choices} ({error}).") from error
    names, of_tools = named_tokens(Path(source)), Path(source).parent / ADDITIONAL / f"{TOOL_USE}.jinja"
    if not source.endswith(".json"):
        is_default = Path(source).name == TEMPLATE and of_tools.is_file()
        return text, names, utf8_text(read_file(of_tools), of_tools) if is_default else None
    try:
        template = parse_json(text, unique=False)["chat_template"]
        if isinstance(template, str):
            return template, names, None
        named = {entry["name"]: entry["template"] for entry in template}
        return named["default"], names, named.get(TOOL_USE)
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{source}: no chat template: expected the key chat_template of a tokenizer_config.json; newer models have "
            "it in a file chat_template.jinja."
        ) from error


def named_tokens(path: Path) -> dict[str, str]:
    """Setting -> special token, such as bos_token, by the files of the folder of a template."""
    return FolderTokens(path.parent).names
