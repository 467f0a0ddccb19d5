"""Tokens of a conversation: the one conversion for training, prompts of rollouts, evaluation and the server."""

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from megajax.config.errors import UserError
from megajax.tokenizers.base import LEAD, Tokenizer, end_tokens_of, join_spans
from megajax.tokenizers.chat_template import BEGIN, CUT, END, ChatTemplate, TemplateMisfit, TextPiece

MARK = "\ufdd2"
"""Inserted into names of special tokens within messages; Unicode reserves it for internal use."""
IMAGE = "\ufdd4"
"""Stands for an image within a message; reserved like MARK."""
RESERVED = re.compile(f"[{MARK}{CUT}{IMAGE}{BEGIN}{END}{LEAD}]")
"""Characters that messages are rendered without."""
SHOWS_PARTS = re.compile(r"""['"]image['"]""")
"""What a template contains that shows the images of messages itself, from contents that are lists of parts."""
ROLES = {name: name for name in ("system", "user", "assistant", "tool")}
ROLES |= {"developer": "system", "human": "user", "gpt": "assistant"}
"""Roles of messages and the names that other programs have for them -> role."""


class UnknownRole(ValueError):
    """A message of no known role."""


def template_message(message: object, name: str = "a message") -> dict[str, Any]:
    """A message of any program as templates take it: `role` and `content`, calls with arguments as objects. A content
    of texts is joined to one; one with images stays a list of parts. name: of the message, for errors.

    Raises ValueError, and UnknownRole.
    """
    if not isinstance(message, Mapping):
        raise ValueError(f"{name} is a {type(message).__name__}, not an object")
    role, content = message.get("role", message.get("from")), message.get("content", message.get("value"))
    if not isinstance(role, str) or role.lower() not in ROLES:
        raise UnknownRole(f"{name} has the role {role!r}; known roles are {', '.join(ROLES)}")
    calls = message.get("tool_calls")
    parts = content if isinstance(content, list) else []
    texts = [part.get("text", "") for part in parts if isinstance(part, Mapping) and part.get("type") == "text"]
    if wrong := [type(text).__name__ for text in texts if not isinstance(text, str)]:
        raise ValueError(f"a text in the content of {name} is {wrong[0]}, not a string")
    if isinstance(content, list) and len(texts) == len(content):
        content = "".join(texts)
    if not isinstance(content, str | list) and not (content is None and calls):
        kind = "missing" if content is None else type(content).__name__
        raise ValueError(f"the content of {name} is {kind}, not a string")
    more = {"tool_calls": [_template_call(call) for call in calls]} if isinstance(calls, list) else {}
    # The template of gpt-oss has another name for reasoning.
    more |= {"thinking": message["reasoning_content"]} if "reasoning_content" in message else {}
    return {**message, "role": ROLES[role.lower()], "content": content or "", **more}


def _template_call(call: Any) -> Any:
    """A call of a function, with its arguments as an object if they are the text of one."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


class MarkedText:
    """Text with marks within names of special tokens, to tokens.

    A name without a mark is the special token. A marked one is ordinary text, as is the text around it up to the next
    special tokens; all other tokens are those of the text without marks.

    Args:
        tokenizer: of the model.
        names_are_text: False: nothing is marked, for messages of known origin.
    """

    def __init__(self, tokenizer: Tokenizer, *, names_are_text: bool = True):
        self.tokenizer, controls = tokenizer, tokenizer.controls()
        self._controls = {number: name.strip() for name, number in controls.items()}
        # A mark cannot be inserted into names of one character; no vocabulary has such special tokens.
        names = sorted((name for name in controls if names_are_text and len(name) > 1), key=len, reverse=True)
        either = "|".join(map(re.escape, names))
        self._names, self._plain = re.compile(either) if names else None, tokenizer.plain() if names else tokenizer
        self._first_letters = re.compile(f"(?=(?:{either}))(.)", re.DOTALL) if names else None

    def mark(self, value: object) -> Any:
        """The value with MARK only within names of special tokens, in all of its texts."""
        if isinstance(value, Mapping):
            return {self.mark(key): self.mark(part) for key, part in value.items()}
        if isinstance(value, list | tuple):
            return [self.mark(part) for part in value]
        if not isinstance(value, str):
            return value
        value = RESERVED.sub("", value)
        return value if self._first_letters is None else self._first_letters.sub(rf"\1{MARK}", value)

    def has_names(self, messages: Sequence[Mapping[str, Any]]) -> bool:
        """Whether a message contains the name of a special token, which is ordinary text."""
        return self._names is not None and self._names.search(json.dumps(messages, ensure_ascii=False)) is not None

    def encode(self, text: str, *, follows: bool = False) -> list[int]:
        """Tokens of a text with marks. follows: it follows a special token."""
        if not text:
            return []
        tokenizer = self._after[0] if follows else self.tokenizer
        return (self._with_ends(text, follows)[0] if MARK in text else tokenizer.encode(text)).tolist()

    def tokenize(
        self, parts: Sequence[TextPiece], *, next_marker: bool = False, follows: bool = False
    ) -> tuple[np.ndarray, np.ndarray]:
        """(Tokens of the whole text of parts, int32 [n]; their weights in the loss, float32 [n]).

        The tokens of an answer are those that end after its first character begins and not after its last: one that
        begins before an answer and ends in it, as the " yes" of "assistant: yes", belongs to the answer; one that
        begins in an answer and ends after it does not. A special token ends where its name does, without the blanks
        that it strips.

        next_marker: the token after an answer has the weight of the answer if it is one that stops generation, and the
        answer has none: so a template ends answers that writes nothing after them, as GLM's. follows: see `encode`.
        """
        text = "".join(part.text for part in parts)
        if len(parts) > 1 and text:
            ids, places = self._with_ends(text, follows)
            borders = [*accumulate(len(part.text) - part.text.count(MARK) for part in parts)]
            tokens, ends = ids.tolist(), np.searchsorted(np.maximum.accumulate(places), borders, side="right").tolist()
        else:  # no borders
            tokens = self.encode(text, follows=follows)
            ends = [len(tokens)] * len(parts)
        stops = end_tokens_of(self.tokenizer) if next_marker else frozenset()
        weights = np.zeros(len(tokens), np.float32)
        for part, (first, last) in zip(parts, pairwise([0, *ends]), strict=True):
            if part.weight:
                weights[first:last] = part.weight
                marker = stops.intersection(tokens[last : last + 1])
                if stops.isdisjoint(tokens[first:last]):
                    weights[last : last + len(marker)] = part.weight
        return np.array(tokens, np.int32), weights

    @cached_property
    def _after(self) -> tuple[Tokenizer, Tokenizer]:
        """The tokenizer, and that of ordinary text, for texts that follow a special token."""
        return self.tokenizer.after_special(), self._plain.after_special()

    def _with_ends(self, text: str, follows: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of a text with marks, int32 [n], and the places where they end in the text without marks, int64 [n].

        The text with its marks is encoded, which shows the true special tokens; then, as ordinary text, each stretch
        between them that has a mark, without its marks.
        """
        first = self._after[0] if follows else self.tokenizer
        ids, spans = first.encode_spans(text)
        by_words = type(self.tokenizer).encode_spans is Tokenizer.encode_spans and not self.tokenizer.table
        if by_words and not np.array_equal(ids, first.encode(text)):
            name = type(self.tokenizer).__name__
            raise UserError(f"{name} has neither encode_spans nor a table of bytes, which conversations need")
        ends, true = spans[:, 1].copy(), self._named(text, ids, spans)
        for place in true:
            begin, end = spans[place].tolist()
            ends[place] = begin + (len(text[begin:end].rstrip()) or end - begin)
        if MARK not in text:
            return ids, ends
        borders = [(-1, 0, 0), *((place, *spans[place].tolist()) for place in true), (len(ids), len(text), len(text))]
        parts = list[tuple[np.ndarray, np.ndarray]]()
        for (place, _, begin), (following, end, _) in pairwise(borders):
            if MARK in text[begin:end]:
                more, places = self._ordinary(text[begin:end], place >= 0 or follows)
                parts.append((more, places + begin))
            else:
                parts.append((ids[place + 1 : following], ends[place + 1 : following]))
            parts.append((ids[following : following + 1], ends[following : following + 1]))
        marks = np.array([match.start() for match in re.finditer(MARK, text)], np.int64)
        places = np.concatenate([part[1] for part in parts])
        return np.concatenate([part[0] for part in parts]), places - np.searchsorted(marks, places)

    def _named(self, text: str, ids: np.ndarray, spans: np.ndarray) -> list[int]:
        """Places of the special tokens whose name is in the text, without a mark; that of unknown text has no name."""
        places = np.flatnonzero(np.isin(ids, [*self._controls])).tolist()
        texts = {place: text[slice(*spans[place].tolist())].strip() for place in places}
        return [place for place in places if texts[place].casefold() == self._controls[int(ids[place])].casefold()]

    def _ordinary(self, text: str, follows: bool) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of a stretch of ordinary text with marks, and the places where they end in it, marks included."""
        rest, pieces = self._after[1], text.split(MARK)
        plain = rest if follows else self._plain
        ids, spans = plain.encode_spans(text.replace(MARK, ""))
        starts = [*accumulate(map(len, pieces), initial=0)]
        if self._named(text.replace(MARK, ""), ids, spans):  # The vocabulary has the name as a token of ordinary text.
            encoded = [(plain if place == 0 else rest).encode_spans(piece) for place, piece in enumerate(pieces)]
            ids, spans = join_spans((start, *pair) for start, pair in zip(starts, encoded, strict=False))
        return ids, spans[:, 1] + np.searchsorted(starts[1:-1], spans[:, 1], side="left")


class Conversation:
    """Messages to tokens.

    Special tokens that the template writes are encoded as such. Their names within a message are ordinary text, so no
    message can end itself or begin a message of another role.

    Args:
        template: renders the text.
        tokenizer: of the model.
        names_are_text: see `MarkedText`.
    """

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer, *, names_are_text: bool = True):
        self._template, self.texts = template, MarkedText(tokenizer, names_are_text=names_are_text)

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
        """Tokens of a prompt: of messages with a `role` and a `content`, a text, or parts {type: text, text: ...} and
        {type: image}; see `template_message`.

        image_token: the token at the place of each image; None: messages are texts.

        header: append the header of an answer. continued: end after the text of the last message, which the answer
        continues. variables: more variables of the template; names of special tokens within them are text too.

        Raises:
            TemplateMisfit: the template rejects the messages, or does not show the text of the last one.
        """
        marked = self._marked(messages)
        if image_token is not None:
            marked = [{**message, "content": self._with_images(message["content"])} for message in marked]
        if continued:
            content: Any = marked[-1]["content"]
            marked[-1]["content"] = content + (CUT if isinstance(content, str) else [{"type": "text", "text": CUT}])
        text = self._template.render(marked, prompt=header, **self.texts.mark(variables or {}))
        if continued:
            text, cut, _ = text.rpartition(CUT)
            if not cut:
                raise TemplateMisfit("the chat template does not show the text of the last message: it cannot go on")
        first, *others = text.split(IMAGE)
        tokens = self.texts.encode(first)
        for part in others:
            tokens += [*([] if image_token is None else [image_token]), *self.texts.encode(part, follows=True)]
        return tokens

    def parts(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any] | None = None,
        *,
        answers: bool = True,
        image: str | None = None,
    ) -> list[TextPiece]:
        """The text of a conversation to learn from, for `MarkedText.tokenize`; see `ChatTemplate.parts`.

        answers: False: all of it is learned. image: in contents, what stands for an image; in the result it is IMAGE.

        Raises TemplateMisfit.
        """
        marked, more = self._marked(messages, image), self.texts.mark(variables or {})
        return (
            self._template.parts(marked, **more) if answers else [TextPiece(self._template.render(marked, **more), 1)]
        )

    def _marked(self, messages: Sequence[Mapping[str, Any]], image: str | None = None) -> list[dict[str, Any]]:
        """Messages for the template. Raises TemplateMisfit for something else."""
        marked = []
        for message in messages:
            try:
                whole = template_message(message)
            except ValueError as error:
                raise TemplateMisfit(str(error)) from error
            marked.append(self.texts.mark(whole))
            if image is not None:
                marked[-1]["content"] = IMAGE.join(map(self.texts.mark, whole["content"].split(image)))
        return marked

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
