"""Bodies of requests: read within limits, parsed as strict JSON, and their fields checked; and the errors for clients.

Limits of numbers are in `sampling_settings.LIMITS`; other fields are checked here. An error is a status and
{"error": {"type", "message", "param", "code"}}.
"""

import asyncio
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn

from starlette.requests import Request

from megajax.config.hints import did_you_mean
from megajax.inference.request import Refused
from megajax.inference.sampling_settings import LIMITS, Sampling, abbreviated
from megajax.inference.server.config import ServerConfig

DEPTH = 32
"""Maximum nesting of objects and lists."""
TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "unavailable_error",
}
"""Status -> type of the error; invalid_request_error for others."""

REFUSALS: Mapping[str, int] = {"queue_full": 429, "too_long": 400, "invalid": 400, "draining": 503}
"""The engine's reason for rejecting a request -> status."""
RETRY_SECONDS: Mapping[int, int] = {429: 1, 503: 5}
"""Status -> value of the header Retry-After."""


class RequestError(Exception):
    """Ends a request with an error response.

    Args:
        status: HTTP status.
        message: the problem, in a sentence.
        param: name of the invalid field; None if it is not about a field.
    """

    def __init__(self, status: int, message: str, param: str | None = None):
        super().__init__(message)
        self.status, self.message, self.param = status, message, param

    def body(self) -> dict[str, Any]:
        """The object of a response or of an event."""
        kind = TYPES.get(self.status, "invalid_request_error")
        return {"error": {"type": kind, "message": self.message, "param": self.param, "code": self.status}}

    def headers(self) -> dict[str, str]:
        """Headers that the status requires."""
        headers = {"Retry-After": str(RETRY_SECONDS[self.status])} if self.status in RETRY_SECONDS else {}
        return headers | ({"WWW-Authenticate": 'Basic realm="the key is the password"'} if self.status == 401 else {})


def invalid(param: str | None, message: str) -> RequestError:
    """A bad request."""
    return RequestError(400, message, param)


def refused(refusal: Refused, names: Mapping[str, str]) -> RequestError:
    """The error of a request that the engine rejected. names: setting of `Sampling` -> field of the request."""
    param = None if refusal.field is None else names.get(refusal.field, refusal.field)
    return RequestError(REFUSALS[refusal.reason], refusal.message, param)


def failed() -> RequestError:
    """A fault of the engine, which the server's log describes."""
    return RequestError(500, "the engine failed on this request; see the server's log")


def shutting_down() -> RequestError:
    """A request that arrives, or is unfinished, while the server shuts down."""
    return RequestError(503, "the server is shutting down")


async def read_object(request: Request, config: ServerConfig) -> dict[str, Any]:
    """The JSON object of a request.

    Raises RequestError: 413 if the body is too large, 408 if it takes too long, 400 for another content type or if it
    is not a JSON object.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise invalid(None, f"the header Content-Type must be application/json, got {kind[:60]!r}")
    return parse_object(await read_body(request, config))


async def read_body(request: Request, config: ServerConfig) -> bytes:
    """Read at most `body_bytes`, regardless of the headers. Raises RequestError, and starlette's ClientDisconnect."""
    most = config.body_bytes
    too_large = RequestError(413, f"the body must have at most {most:,} bytes")
    length = request.headers.get("content-length", "0")
    if not length.isdecimal() or len(length) > 18 or int(length) > most:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(config.body_seconds):
            async for part in request.stream():
                body += part
                if len(body) > most:
                    raise too_large
    except TimeoutError:
        raise RequestError(408, f"the body must arrive within {config.body_seconds:g} seconds") from None
    return bytes(body)


def parse_object(body: bytes) -> dict[str, Any]:
    """Raises RequestError unless the body is UTF-8 and a JSON object, without duplicate keys or deep nesting."""
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise invalid(None, f"the body is not UTF-8: byte {error.start}") from None
    try:
        # Python raises ValueError for numbers with thousands of digits.
        value = json.loads(text, parse_constant=_no_number, object_pairs_hook=_without_duplicates)
    except RequestError:
        raise
    except json.JSONDecodeError as error:
        raise invalid(None, f"the body is not JSON: {error.msg} at character {error.pos}") from None
    except RecursionError:
        raise invalid(None, f"the body has more than {DEPTH} levels of objects and lists") from None
    except ValueError:
        raise invalid(None, "the body has a number with too many digits") from None
    if not isinstance(value, dict):
        raise invalid(None, "the body must be a JSON object")
    _check(value, escapes="\\u" in text)
    return value


def _no_number(word: str) -> NoReturn:
    raise invalid(None, f"the body is not JSON: {word} is not a JSON number")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        name = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise invalid(name[:60], f"{name[:60]!r} is given twice")
    return values


def _check(value: dict[str, Any], *, escapes: bool) -> None:
    """Raises RequestError for deep nesting, or half a surrogate pair, which JSON can express but UTF-8 cannot."""
    pending = [(1, name, part) for name, part in value.items()]
    pending += [(1, name, name) for name in value]
    while pending:
        depth, name, part = pending.pop()
        if isinstance(part, str) and escapes and not _is_text(part):
            printable = name.encode("utf-8", errors="replace").decode()
            raise invalid(printable[:60], f"{printable[:60]!r} has half of a surrogate pair, which is not a character")
        if isinstance(part, (dict, list)):
            if depth == DEPTH:
                raise invalid(name[:60], f"{name[:60]!r} has more than {DEPTH} levels of objects and lists")
            parts = [*part, *part.values()] if isinstance(part, dict) else part
            pending += [(depth + 1, name, inner) for inner in parts]


def _is_text(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


class Field(NamedTuple):
    """A field that a request may have."""

    kind: str
    """Description of the type, for messages and documentation."""
    read: Callable[[Any], Any]
    """JSON value -> Python value. Raises ValueError for a value of another type."""
    setting: str | None = None
    """Setting of `Sampling`, which checks the limits."""
    null: bool = False
    """Whether null means that the field is missing."""


class Unsupported(NamedTuple):
    """A field of other servers, rejected with a reason."""

    reason: str


type Fields = Mapping[str, Field | Unsupported]


def _identity(value: Any) -> Any:
    return value


def _instance(kind: type) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if not isinstance(value, kind):
            raise ValueError
        return value

    return read


def _stop(value: Any) -> tuple[str, ...]:
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(string, str) for string in strings):
        raise ValueError
    return tuple(strings)


def _tokens(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(token) is int for token in value):
        raise ValueError
    return tuple(value)


def _bias(value: Any) -> dict[int, float]:
    """Token -> bias; the keys of JSON objects are strings."""
    if not isinstance(value, dict) or not all(re.fullmatch("[0-9]{1,10}", name) for name in value):
        raise ValueError
    return {int(name): bias for name, bias in value.items()}


def _stream_options(value: Any) -> bool:
    """Whether the last event has the usage."""
    if not isinstance(value, dict) or not value.keys() <= {"include_usage"}:
        raise ValueError
    return _instance(bool)(value.get("include_usage", False))


def number(setting: str) -> Field:
    """A number with limits in LIMITS."""
    limit = LIMITS[setting]
    kind = "an integer" if limit.kind is int else "a number"
    return Field(kind, _identity, setting, limit.optional)


FLAG = Field("true or false", _instance(bool))
STRING = Field("a string", _instance(str))

SAMPLING: Fields = {
    **{
        name: number(name)
        for name in (
            *("max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty"),
            *("presence_penalty", "frequency_penalty", "seed", "n", "best_of", "beams", "length_penalty"),
        )
    },
    "logit_bias": Field("an object of token ids and numbers", _bias, "logit_bias", null=True),
    "stop": Field("a string or a list of strings", _stop, "stop", null=True),
    "stop_token_ids": Field("a list of token ids", _tokens, "stop_tokens", null=True),
    "ignore_eos": FLAG._replace(setting="ignore_eos"),
}
"""Fields of both OpenAI routes, with the usual names for settings that OpenAI lacks."""

COMMON: Fields = {
    **SAMPLING,
    "model": STRING,
    "stream": FLAG._replace(null=True),
    "stream_options": Field("an object with include_usage", _stream_options, null=True),
    "response_format": Field("an object with a type", _instance(dict), null=True),
    "user": STRING._replace(null=True),
}

COMPLETIONS: Fields = {
    **COMMON,
    "prompt": Field("a string, a list of strings, a list of token ids, or a list of such lists", _identity),
    "echo": FLAG._replace(null=True),
    "logprobs": number("logprobs"),
    "special_tokens": FLAG,
    "add_special_tokens": FLAG,
    "suffix": Unsupported("text is not inserted before a suffix: leave it out"),
}
"""Fields of /v1/completions."""

NO_TOOLS = Unsupported("tools are not supported: describe them in a message, and ask for response_format json_schema")
CHAT: Fields = {
    **COMMON,
    "messages": Field("a list of messages", _identity),
    "max_completion_tokens": number("max_tokens"),
    "logprobs": FLAG._replace(null=True),
    "top_logprobs": number("logprobs"),
    **dict.fromkeys(("tools", "tool_choice", "functions", "function_call", "parallel_tool_calls"), NO_TOOLS),
    "chat_template": Unsupported("templates are chosen when the server starts (inference.template)"),
}
"""Fields of /v1/chat/completions."""

TOKENIZE: Fields = {
    "model": STRING,
    "prompt": STRING,
    "messages": Field("a list of messages", _identity),
    "special_tokens": FLAG,
    "add_special_tokens": FLAG,
}
"""Fields of /tokenize, which takes either prompt or messages."""
DETOKENIZE: Fields = {"model": STRING, "tokens": Field("a list of token ids", _tokens)}
"""Fields of /detokenize."""


class Values(dict[str, Any]):
    """The fields of a body as Python values."""

    def __init__(self, body: Mapping[str, Any], fields: Fields):
        """Checks names and types. Raises RequestError."""
        super().__init__()
        self._fields = {name: field for name, field in fields.items() if isinstance(field, Field)}
        for name, value in body.items():
            field = fields.get(name)
            if field is None:
                suggestion = did_you_mean(name[:60], list(self._fields))
                raise invalid(name[:60], f"unknown field {name[:60]!r}" + f": {suggestion}" * bool(suggestion))
            if isinstance(field, Unsupported):
                raise invalid(name, f"{name}: {field.reason}")
            if value is None and field.null:
                continue
            try:
                self[name] = field.read(value)
            except ValueError:
                raise invalid(name, f"{name} must be {field.kind}, got {abbreviated(value)}") from None

    def demand(self, name: str) -> Any:
        """The value of a required field. Raises RequestError if it is missing."""
        if name not in self:
            raise invalid(name, f"{name} must be given")
        return self[name]

    def sampling(self, base: Sampling) -> Sampling:
        """The settings of `base`, replaced by those of the fields. Raises RequestError for values beyond the limits."""
        settings = {setting: value for name, value in self.items() if (setting := self._fields[name].setting)}
        sampling, names = replace(base, **settings), self.names()
        for problem in sampling.problems():
            param = names.get(problem.setting, problem.setting)
            raise invalid(param, f"{param} {problem.message}")
        return sampling

    def names(self) -> dict[str, str]:
        """Setting of `Sampling` -> its field; of two fields, the one in the request."""
        order = sorted(self._fields, key=lambda name: name in self)
        return {setting: name for name in order if (setting := self._fields[name].setting)}
