"""Commands of a shell script as a tree. Words keep their quotes and expansions."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Array:
    """NAME=(entries) or NAME+=(entries)."""

    start: str
    entries: tuple[str, ...]


@dataclass(slots=True)
class Document:
    """A here-document. Its text is known at the end of the line that has its operator."""

    delimiter: str
    text: str = ""
    expands: bool = True


@dataclass(frozen=True, slots=True)
class Simple:
    """Assignments, and a command with its arguments."""

    line: int
    words: tuple[str | Array, ...]
    document: Document | None = None
    output: str | None = None
    """The file that standard output goes to."""


@dataclass(frozen=True, slots=True)
class Test:
    """[[ words ]]."""

    line: int
    words: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """(( text ))."""

    line: int
    text: str


@dataclass(frozen=True, slots=True)
class Chain:
    """Commands joined by && and ||; `operators` has one entry less."""

    line: int
    commands: "tuple[Node, ...]"
    operators: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Commands joined by |, or one command after !."""

    line: int
    commands: "tuple[Node, ...]"
    inverse: bool


@dataclass(frozen=True, slots=True)
class Group:
    """{ commands; }, or ( commands ) in a shell of its own."""

    line: int
    body: "Body"
    subshell: bool


@dataclass(frozen=True, slots=True)
class If:
    """if, elif …, else."""

    line: int
    branches: "tuple[tuple[Condition, Body], ...]"
    otherwise: "Body"


@dataclass(frozen=True, slots=True)
class While:
    """while, or until."""

    line: int
    condition: "Condition"
    body: "Body"
    until: bool


@dataclass(frozen=True, slots=True)
class For:
    """for NAME in words; None: the script's arguments."""

    line: int
    name: str
    words: tuple[str, ...] | None
    body: "Body"


@dataclass(frozen=True, slots=True)
class Count:
    """for ((first; condition; step))."""

    line: int
    parts: tuple[str, ...]
    body: "Body"


@dataclass(frozen=True, slots=True)
class Case:
    """case word in patterns) body;; esac."""

    line: int
    word: str
    branches: "tuple[tuple[tuple[str, ...], Body], ...]"


@dataclass(frozen=True, slots=True)
class Function:
    """The definition of a function."""

    line: int
    name: str
    body: "Node"


@dataclass(frozen=True, slots=True)
class Condition:
    """The commands after if, elif, while or until, and their source for messages."""

    line: int
    body: "Body"
    text: str


type Node = Simple | Test | Arithmetic | Chain | Pipeline | Group | If | While | For | Count | Case | Function
type Body = tuple[Node, ...]
