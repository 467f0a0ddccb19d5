"""Tokens of a conversation as a prompt of a model."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from megajax.tokenizers.base import Tokenizer
from megajax.tokenizers.chat_template import ChatTemplate, TemplateMisfit

MARK = "\ufdd2"
"""Inserted into names of special tokens within messages; Unicode reserves it for internal use."""
CUT = "\ufdd3"
"""Ends a message that the answer continues; reserved like MARK."""
IMAGE = "\ufdd4"
"""Stands for an image within a message; reserved like MARK."""
SHOWS_PARTS = re.compile(r"""['"]image['"]""")
"""What a template contains that shows the images of messages itself, from contents that are lists of parts."""


class Conversation:
    """Messages to tokens.

    Special tokens that the template writes are encoded as such. Their names within a message are ordinary text, so no
    message can end itself or begin a message of another role.

    Args:
        template: renders the text.
        tokenizer: of the model.
    """

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer):
        self._template, self._tokenizer, self._plain = template, tokenizer, tokenizer.plain()
        self._controls = tokenizer.controls()
        # A mark cannot be inserted into names of one character; no vocabulary has such special tokens.
        names = sorted((name for name in self._controls if len(name) > 1), key=len, reverse=True)
        either = "|".join(map(re.escape, names))
        self._names = re.compile(either) if names else None
        self._first_letters = re.compile(f"(?=(?:{either}))(.)", re.DOTALL) if names else None

    @property
    def template(self) -> str:
        """The text of the template."""
        return self._template.text

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        header: bool = True,
        continued: bool = False,
        variables: Mapping[str, Any] | None = None,
        image_token: int | None = None,
    ) -> list[int]:
        """Tokens of messages with a `role` and a `content`: a text, or parts {type: text, text: ...} and {type: image}.

        image_token: the token at the place of each image; None: messages are texts.

        header: append the header of an answer. continued: end after the text of the last message, which the answer
        continues. variables: more variables of the template; names of special tokens within them are text too.

        Raises:
            TemplateMisfit: the template rejects the messages, or does not show the text of the last one.
        """
        marked = [self._mark_special_names(dict(message)) for message in messages]
        if image_token is not None:
            marked = [{**message, "content": self._with_images(message["content"])} for message in marked]
        if continued:
            content = marked[-1]["content"]
            end: Any = CUT if isinstance(content, str) else [{"type": "text", "text": CUT}]
            marked[-1]["content"] = content + end
        text = self._template.render(marked, prompt=header, **self._mark_special_names(dict(variables or {})))
        if continued:
            text, cut, _ = text.rpartition(CUT)
            if not cut:
                raise TemplateMisfit("the chat template does not show the text of the last message: it cannot go on")
        first, *others = text.split(IMAGE)
        tokens = self._encode(first)
        for part in others:
            tokens += [*[token for token in (image_token,) if token is not None], *self._encode(part)]
        return tokens

    def _encode(self, text: str) -> list[int]:
        """Tokens of a rendered text, with marks."""
        if self._names is None or MARK not in text:
            return self._tokenizer.encode(text).tolist() if text else []
        tokens, position = [], 0
        for match in self._names.finditer(text):
            tokens += [*self._text(text[position : match.start()]), self._controls[match[0]]]
            position = match.end()
        return tokens + self._text(text[position:])

    def _with_images(self, content: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
        """The content of a message as the template takes it. In a text, images come before it, on a line of their own,
        as in training (`ImageTextConfig`), unless a text comes before an image."""
        if SHOWS_PARTS.search(self.template):
            return [{"type": "text", "text": content}] if isinstance(content, str) else content
        if isinstance(content, str):
            return content
        kinds = [part["type"] for part in content]
        texts = [IMAGE if part["type"] == "image" else part["text"] for part in content]
        images = kinds.count("image")
        between = "\n" if kinds[:images] == ["image"] * images and images < len(kinds) else ""
        return "".join(texts[:images]) + between + "".join(texts[images:])

    def stop_texts(self) -> tuple[str, ...]:
        """Texts that end an answer: the template's text between an answer and the next question, and its first line."""
        turns = [{"role": role, "content": MARK} for role in ("user", "assistant", "user")]
        try:
            parts = self._template.render(turns).split(MARK)
        except TemplateMisfit:
            return ()
        between = parts[2] if len(parts) == 4 else ""
        return tuple(dict.fromkeys(end for end in (between.partition("\n")[0].strip(), between) if end.strip()))

    def _mark_special_names(self, value: Any) -> Any:
        """The value with MARK only within names of special tokens, in all of its texts."""
        if isinstance(value, dict):
            return {self._mark_special_names(key): self._mark_special_names(part) for key, part in value.items()}
        if isinstance(value, list | tuple):
            return [self._mark_special_names(part) for part in value]
        if not isinstance(value, str):
            return value
        value = value.replace(MARK, "").replace(CUT, "").replace(IMAGE, "")
        return value if self._first_letters is None else self._first_letters.sub(rf"\1{MARK}", value)

    def _text(self, text: str) -> list[int]:
        return self._plain.encode(text.replace(MARK, "")).tolist() if text else []
