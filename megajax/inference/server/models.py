"""The model of a server, and the tokenization of its prompts."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megajax.config.budget import OverBudget
from megajax.config.errors import UserError
from megajax.inference.sampling_settings import abbreviated
from megajax.inference.server.errors import RequestError, invalid
from megajax.inference.worker import Worker
from megajax.tokenizers.base import Tokenizer
from megajax.tokenizers.chat_template import TemplateMisfit
from megajax.tokenizers.conversation import Conversation

ROLES = ("system", "developer", "user", "assistant")
LONG = 4096
"""Texts with at least this many characters are tokenized on another thread, so that other requests do not wait."""


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """A named model and its engine."""

    name: str
    worker: Worker
    tokenizer: Tokenizer
    conversation: Conversation | None
    """None without a chat template."""
    length: int
    """Maximum number of tokens of a prompt and its answer."""
    created: int = field(default_factory=lambda: int(time.time()))
    plain: Tokenizer = field(init=False)
    """Encodes text from clients: names of special tokens are plain text."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "plain", self.tokenizer.plain())

    def demand_name(self, values: Mapping[str, Any]) -> None:
        """Raises RequestError 404 if the field `model` names another model."""
        if (name := values.get("model", self.name)) != self.name:
            raise RequestError(404, f"no model {abbreviated(name)}: there is {self.name}", "model")

    def card(self) -> dict[str, Any]:
        """The model's entry in /v1/models.

        `max_model_len` and `chat_template` (whether the model answers messages) are not OpenAI's.
        """
        entry = {"id": self.name, "object": "model", "created": self.created, "owned_by": "megajax"}
        return entry | {"max_model_len": self.length, "chat_template": self.conversation is not None}

    async def encode(self, text: str, *, special_tokens: bool, prefix: bool) -> list[int]:
        """Tokens of a text.

        special_tokens: whether names of special tokens become special tokens. prefix: start with `Tokenizer.prefix`.

        Raises RequestError for text that the tokenizer rejects.
        """
        tokenizer = self.tokenizer if special_tokens else self.plain
        tokens = await _tokens(text, lambda: tokenizer.encode(text).tolist())
        return [*self.tokenizer.prefix, *tokens] if prefix else tokens

    async def converse(self, messages: Any) -> list[int]:
        """Tokens of a client's messages, followed by the header of an answer. Raises RequestError."""
        conversation = self.conversation
        if conversation is None:
            raise invalid("messages", f"{self.name} has no chat template: use /v1/completions")
        checked = check_messages(messages)
        text = "".join(str(message["content"]) for message in checked)
        try:
            return await _tokens(text, lambda: conversation.encode(checked), "messages")
        except (TemplateMisfit, OverBudget) as error:
            raise invalid("messages", str(error)) from None

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of a client's tokens. Raises RequestError for a token outside the vocabulary."""
        self.demand_tokens(tokens, "tokens")
        return self.tokenizer.decode(tokens)

    def demand_tokens(self, tokens: Sequence[int], param: str) -> None:
        """Raises RequestError for a token outside the vocabulary."""
        size = self.tokenizer.vocabulary_size
        if unknown := [token for token in tokens if not 0 <= token < size]:
            raise invalid(
                param, f"token {abbreviated(unknown[0])} is outside the vocabulary: ids go from 0 to {size - 1}"
            )


async def _tokens(text: str, encode: Callable[[], list[int]], param: str = "prompt") -> list[int]:
    try:
        return encode() if len(text) < LONG else await asyncio.to_thread(encode)
    except UserError as error:
        raise invalid(param, str(error)) from None


def check_messages(messages: Any) -> list[dict[str, str]]:
    """Messages with a role and a text. Raises RequestError that names the location."""
    if not isinstance(messages, list) or not messages:
        raise invalid("messages", f"messages must be a list with a message or more, got {abbreviated(messages)}")
    return [_message(message, f"messages[{place}]") for place, message in enumerate(messages)]


def _message(message: Any, location: str) -> dict[str, str]:
    if not isinstance(message, dict):
        raise invalid(location, f"{location} must be an object with role and content, got {abbreviated(message)}")
    if unknown := message.keys() - {"role", "content", "name"}:
        name = min(unknown)[:60]
        raise invalid(f"{location}.{name}", f"unknown field {name!r} in {location}: it has role, content and name")
    role, content, name = message.get("role"), message.get("content"), message.get("name")
    if role not in ROLES:
        raise invalid(f"{location}.role", f"{location}.role must be one of {', '.join(ROLES)}, got {abbreviated(role)}")
    if isinstance(content, list):
        content = "".join(_part(part, f"{location}.content[{place}]") for place, part in enumerate(content))
    if not isinstance(content, str):
        raise invalid(f"{location}.content", f"{location}.content must be a string, got {abbreviated(content)}")
    if name is not None and not isinstance(name, str):
        raise invalid(f"{location}.name", f"{location}.name must be a string, got {abbreviated(name)}")
    # Templates use `system`; OpenAI has renamed it to `developer`.
    checked = {"role": "system" if role == "developer" else role, "content": content}
    return checked if name is None else {**checked, "name": name}


def _part(part: Any, location: str) -> str:
    if not isinstance(part, dict) or part.get("type") != "text" or part.keys() != {"type", "text"}:
        raise invalid(
            location, f"{location} must be an object with type text and the text: other types are not supported"
        )
    if not isinstance(part["text"], str):
        raise invalid(location, f"{location}.text must be a string, got {abbreviated(part['text'])}")
    return part["text"]
