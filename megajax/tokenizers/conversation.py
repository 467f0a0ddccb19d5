"""Tokens of a conversation that a model continues."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from megajax.tokenizers.base import Tokenizer
from megajax.tokenizers.chat_template import ChatTemplate, TemplateMisfit

MARK = "\ufdd2"
"""Put into names of special tokens that a message contains; Unicode reserves it for a program's own use."""


class Conversation:
    """Messages to tokens.

    The special tokens that the template writes are special tokens. Their names within a message are ordinary text, so
    that no message can end itself or begin one of another role.

    Args:
        template: makes the text.
        tokenizer: of the model.
    """

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer):
        self._template, self._tokenizer, self._plain = template, tokenizer, tokenizer.plain()
        self._controls = tokenizer.controls()
        # Names of one character cannot be cut in two; no vocabulary has such special tokens.
        names = sorted((name for name in self._controls if len(name) > 1), key=len, reverse=True)
        either = "|".join(map(re.escape, names))
        self._names = re.compile(either) if names else None
        self._begins = re.compile(f"(?=(?:{either}))(.)", re.DOTALL) if names else None

    def encode(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Tokens of messages with a `role` and a text `content`, then of the header of an answer.

        Raises:
            TemplateMisfit: the template refuses them.
        """
        marked = [{key: self._marked(value) for key, value in message.items()} for message in messages]
        text = self._template.render(marked, prompt=True)
        if self._names is None or MARK not in text:
            return self._tokenizer.encode(text).tolist()
        tokens, done = [], 0
        for match in self._names.finditer(text):
            tokens += [*self._text(text[done : match.start()]), self._controls[match[0]]]
            done = match.end()
        return tokens + self._text(text[done:])

    def ends(self) -> tuple[str, ...]:
        """Texts that end an answer: what the template puts between it and the next question, and its first line."""
        turns = [{"role": role, "content": MARK} for role in ("user", "assistant", "user")]
        try:
            parts = self._template.render(turns).split(MARK)
        except TemplateMisfit:
            return ()
        between = parts[2] if len(parts) == 4 else ""
        return tuple(dict.fromkeys(end for end in (between.partition("\n")[0].strip(), between) if end.strip()))

    def _marked(self, value: Any) -> Any:
        """A text without MARK but within names of special tokens."""
        if not isinstance(value, str):
            return value
        value = value.replace(MARK, "")
        return value if self._begins is None else self._begins.sub(rf"\1{MARK}", value)

    def _text(self, text: str) -> list[int]:
        return self._plain.encode(text.replace(MARK, "")).tolist() if text else []
