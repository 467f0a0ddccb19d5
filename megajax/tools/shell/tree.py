"""Commands of a shell script as a tree. Words keep their quotes and expansions."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Document:
    """A here-document, with or without expansions, or the word after <<<."""

    text: str
    kind: Literal["expands", "plain", "word"]


@dataclass(frozen=True, slots=True)
class Node:
    """A command, and the line that it begins at."""

    line: int


type Body = tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Simple(Node):
    """Assignments, and a command with its arguments. ((text)) and [[ words ]] are commands named (( and [[."""

    words: tuple[str, ...]
    document: Document | None = None
    output: str | None = None
    """The file that standard output goes to."""


@dataclass(frozen=True, slots=True)
class Chain(Node):
    """Commands joined by && and ||; `operators` has one entry less."""

    commands: Body
    operators: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Pipeline(Node):
    """Commands joined by |, or one command after !."""

    commands: Body
    inverse: bool


@dataclass(frozen=True, slots=True)
class Group(Node):
    """{ commands; }, or ( commands ) in a shell of its own."""

    body: Body
    subshell: bool


@dataclass(frozen=True, slots=True)
class Condition(Node):
    """The commands after if, elif, while or until, and their source for messages."""

    body: Body
    text: str


@dataclass(frozen=True, slots=True)
class If(Node):
    """if and else; elif is another If in `otherwise`."""

    condition: Condition
    body: Body
    otherwise: Body


@dataclass(frozen=True, slots=True)
class While(Node):
    """while, or until."""

    condition: Condition
    body: Body
    until: bool


@dataclass(frozen=True, slots=True)
class For(Node):
    """for NAME in words; None: the script's arguments."""

    name: str
    words: tuple[str, ...] | None
    body: Body


@dataclass(frozen=True, slots=True)
class Count(Node):
    """for ((first; condition; step))."""

    parts: tuple[str, ...]
    body: Body


@dataclass(frozen=True, slots=True)
class Case(Node):
    """case word in patterns) body;; esac."""

    word: str
    branches: tuple[tuple[tuple[str, ...], Body], ...]


@dataclass(frozen=True, slots=True)
class Function(Node):
    """The definition of a function."""

    name: str
    body: Node
