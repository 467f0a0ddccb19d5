"""A file of prompts, and a file of their answers; imports neither jax nor flax."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Self

from megajax.config.errors import UserError
from megajax.config.read_limits import parse_json, utf8_text
from megajax.inference.request import Output, TokenScore
from megajax.storage.write_errors import write_fault
from megajax.tokenizers.base import Tokenizer, start_token, with_prefix
from megajax.tokenizers.chat_template import TemplateMisfit
from megajax.tokenizers.conversation import Conversation, template_message


class Prompt(NamedTuple):
    """A prompt of a file."""

    where: str
    """File and line, for messages."""
    content: str | list[int] | list[dict[str, Any]]
    """A text, token ids, or the messages of a conversation."""
    variables: Mapping[str, Any] = MappingProxyType({})
    """More variables of the chat template, such as `tools`."""

    @property
    def is_conversation(self) -> bool:
        return isinstance(self.content, list) and isinstance(self.content[0], dict)


def read_prompts(path: Path) -> list[Prompt]:
    """Each line is a prompt; in .jsonl files an object with `prompt`, a text or token ids, or `messages` and `tools`.

    Blank lines are skipped. Raises UserError that names the line.
    """
    try:
        lines = utf8_text(path.read_bytes(), f"--prompts={path}").split("\n")
    except OSError as error:
        raise UserError(f"--prompts={path}: cannot be read: {error.strerror or error}") from error
    jsonl = path.suffix in (".jsonl", ".ndjson")
    numbered = [(f"{path}, line {number}", line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        raise UserError(f"--prompts={path}: has no prompts: write one in each line")
    return [_prompt(line, where) if jsonl else Prompt(where, line.rstrip("\r")) for where, line in numbered]


def _prompt(line: str, where: str) -> Prompt:
    """The prompt of a line. Raises UserError if the line is not a prompt."""
    forms = 'expected {"prompt": "text"}, {"prompt": [1, 2, 3]} or {"messages": [{"role": "user", "content": "text"}]}'
    try:
        value = parse_json(line)
    except ValueError as error:
        raise UserError(f"{where}: is not valid JSON: {error}; {forms}") from error
    if not isinstance(value, dict) or len(value.keys() & {"prompt", "messages"}) != 1:
        raise UserError(f"{where}: {forms}")
    if unknown := value.keys() - ({"messages", "tools"} if "messages" in value else {"prompt"}):
        raise UserError(f"{where}: unknown field {min(unknown)!r}; {forms}")
    content = value.get("prompt", value.get("messages"))
    if "prompt" in value:
        ids = isinstance(content, list) and content and all(type(token) is int and token >= 0 for token in content)
        valid = isinstance(content, str) or ids
    else:
        valid = isinstance(content, list) and bool(content) and isinstance(content[0], dict)
    if not valid:
        raise UserError(f"{where}: {forms}")
    prompt = Prompt(where, content, {"tools": value["tools"]} if "tools" in value else {})
    demand_messages(prompt)
    return prompt


def demand_messages(prompt: Prompt) -> None:
    """Raises UserError for messages that no template takes."""
    for number, message in enumerate(prompt.content if prompt.is_conversation else (), start=1):
        try:
            content = template_message(message, f"message {number}")["content"]
        except ValueError as error:
            raise UserError(f"{prompt.where}: {error}") from error
        if not isinstance(content, str):
            raise UserError(f"{prompt.where}: the content of message {number} has parts other than texts")


def encode(
    prompt: Prompt, tokenizer: Tokenizer, conversation: Conversation | None, suffix: Sequence[int] = ()
) -> tuple[int, ...]:
    """Token ids of a prompt, with those of `suffix` after a text.

    Raises UserError for a conversation without a chat template, or rejected by it.
    """
    content: Any = prompt.content
    if isinstance(content, str):
        return (*with_prefix(tokenizer, content).tolist(), *suffix) or (start_token(tokenizer),)
    if not prompt.is_conversation:
        return tuple(content)
    try:
        return tuple(demand_conversation(conversation, prompt.where).encode(content, variables=prompt.variables))
    except TemplateMisfit as error:
        raise UserError(f"{prompt.where}: {error}") from error


def demand_conversation(conversation: Conversation | None, where: str) -> Conversation:
    """Raises UserError for a model without a chat template. where: the flag or line that needs it."""
    if conversation is None:
        raise UserError(
            f"{where}: the model has no chat template. Set inference.template to a file with one, or to a name: "
            "plain or chatml"
        )
    return conversation


def as_json(answer: Output) -> dict[str, Any]:
    """text, tokens, finish; with scores also `logprobs` and `top_logprobs`, and those of the prompt."""
    fields: dict[str, Any] = {"text": answer.text, "tokens": answer.tokens, "finish": answer.finish}
    fields |= _scores("", answer.scores) if answer.scores else {}
    return fields | (_scores("prompt_", answer.prompt_scores) if answer.prompt_scores else {})


def _scores(before: str, scores: Sequence[TokenScore | None]) -> dict[str, Any]:
    """Log-probabilities of the tokens and of the most likely tokens."""
    fields = {f"{before}logprobs": [score and score.logprob for score in scores]}
    if any(score and score.top for score in scores):
        fields[f"{before}top_logprobs"] = [score and [list(pair) for pair in score.top] for score in scores]
    return fields


class AnswerFile:
    """A .jsonl file of answers in the order of the prompts, a line for each: `index`, `choice`, the answer, `key`.

    Answers to complete prompts from an interrupted attempt are kept; `completed` is their number.
    """

    def __init__(self, path: Path, choices: int, keys: Sequence[str]):
        """choices: answers of a prompt; keys: for each prompt, a digest of everything that its answers depend on.

        Raises UserError for a file with other answers, or one that cannot be written.
        """
        self._keys, self.completed = keys, 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+b")
            self._file.seek(0)
            end = 0
            while lines := [line for _ in range(choices) if (line := self._file.readline())]:
                if not all(self._is_answer(line, choice) for choice, line in enumerate(lines)):
                    message = f"{path} has answers to other prompts, by other settings or of another model"
                    raise UserError(f"--output={path}: {message}, from prompt {self.completed} on: name another file")
                if len(lines) < choices or not lines[-1].endswith(b"\n"):
                    break
                self.completed, end = self.completed + 1, self._file.tell()
            self._file.truncate(end)
        except OSError as error:
            raise UserError(f"--output={path}: cannot be written: {write_fault(error)}") from error

    def _is_answer(self, line: bytes, choice: int) -> bool:
        """Whether a line is an answer to the next prompt. For an incomplete last line, only its start is compared; a
        file with another start must not be truncated."""
        if not line.endswith(b"\n"):
            start = b'{"index": %d, "choice": %d, "text": "' % (self.completed, choice)
            return self.completed < len(self._keys) and line[: len(start)] == start[: len(line)]
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            return False
        key = self._keys[self.completed] if self.completed < len(self._keys) else None
        return isinstance(value, dict) and (value.get("choice"), value.get("key")) == (choice, key)

    def write(self, answers: Sequence[Output]) -> None:
        """Write the answers to the next prompt."""
        for choice, answer in enumerate(answers):
            line = {"index": self.completed, "choice": choice, **as_json(answer), "key": self._keys[self.completed]}
            self._file.write(json.dumps(line, ensure_ascii=False).encode("utf-8", errors="replace") + b"\n")
        self._file.flush()
        self.completed += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()


def write_answers(
    output: Path | None,
    choices: int,
    keys: Sequence[str],
    answers: Callable[[int], Iterable[Sequence[Output]]],
    show: Callable[[str], None],
    progress: Callable[[int, int], None],
) -> None:
    """Write the answers to all prompts: into a file, which may have the first of them, or show their texts.

    choices, keys: as in `AnswerFile`; answers: those to each prompt from a number on. Raises UserError.
    """
    if output is None:
        for outputs in answers(0):
            show("".join(f"{answer.text}\n" for answer in outputs))
        return
    with AnswerFile(output, choices, keys) as file:
        for outputs in answers(file.completed):
            file.write(outputs)
            progress(file.completed, len(keys))
