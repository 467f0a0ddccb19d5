"""A table of another trainer's flags, each a setting, unnecessary or refused, and command lines read by it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from megajax.config.errors import Problem
from megajax.config.nearest import did_you_mean

type Settings = Mapping[str, Any]
"""Dotted names of settings -> values."""

DEFINE = "give the script's own arguments behind its name, and others by --define=NAME=VALUE"
UNKNOWN = "\ufffe"
"""Stands in a word for a part of it that is not known."""


@dataclass(frozen=True, slots=True)
class Word:
    """One word of a command line and where it stands."""

    text: str
    place: str = ""
    unknown: tuple[str, ...] = ()
    """What is not known of it; it stands in the text as UNKNOWN."""


@dataclass(frozen=True, slots=True)
class Mapped:
    """The flag is one setting, or `by` makes the settings it takes part in."""

    settings: tuple[str, ...]
    by: "Callable[[Arguments], Settings] | None" = None


@dataclass(frozen=True, slots=True)
class Unnecessary:
    """There is nothing to set."""

    reason: str


@dataclass(frozen=True, slots=True)
class Refused:
    """This version can't do it."""

    reason: str


type Fate = Mapped | Unnecessary | Refused


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag: name without dashes, kind of its value (bool: none, list: any number of words), default, fate."""

    name: str
    kind: type
    fate: Fate
    default: Any = None
    also: tuple[str, ...] = ()
    """Other spellings."""


KINDS: Mapping[str, type] = {kind.__name__: kind for kind in (bool, int, float, str, list)}


class Maker(Protocol):
    """A function that makes settings."""

    __name__: str

    def __call__(self, args: "Arguments", /) -> Settings: ...


def read_table(text: str, functions: Iterable[Maker]) -> dict[str, tuple[Flag, ...]]:
    """Title of a part -> its rows, of a text as megatron_flags.txt explains it; `functions` make settings."""
    by_name = {function.__name__: function for function in functions}
    parts: dict[str, tuple[Flag, ...]] = {}
    for part in text.split("\n# ")[1:]:
        title, _, body = part.partition("\n")
        rows = []
        for line in filter(None, body.replace("\n  ", " ").splitlines()):
            names, _, answer = line.partition(" => ")
            fate = _fate(answer, by_name)
            rows += [_row(token, fate) for token in names.split()]
        parts[title] = tuple(rows)
    return parts


def _fate(answer: str, functions: "Mapping[str, Callable[[Arguments], Settings]]") -> Fate:
    start, colon, rest = answer.partition(": ")
    if start in ("refused", "unnecessary"):
        return Refused(rest) if start == "refused" else Unnecessary(rest)
    return Mapped(tuple(rest.split()), functions[start]) if colon else Mapped((answer,))


def _row(token: str, fate: Fate) -> Flag:
    typed, equals, value = token.partition("=")
    names, _, written = typed.partition(":")
    name, *also = names.split("|")
    kind = KINDS[written or "list"]
    # A switch that is a setting by itself leaves it alone where it is not given.
    default = False if kind is bool and not (isinstance(fate, Mapped) and fate.by is None) else None
    if equals:
        default = value.split() if kind is list else kind(value)
    return Flag(name, kind, fate, default, tuple(also))


@dataclass
class Notes:
    """What there is to say about the flags of one command line."""

    problems: list[Problem] = field(default_factory=list)
    """What makes no sense: unknown flags, contradictions."""
    refusals: list[Problem] = field(default_factory=list)
    """What makes sense and cannot be had."""
    remarks: list[Problem] = field(default_factory=list)
    """What the person at the terminal should know of a flag that was mapped."""
    unread: set[str] = field(default_factory=set)
    """Flags whose value could not be read, which is a problem already."""


class Arguments:
    """The values of a command line's flags, or their defaults, and notes on what is wrong with them."""

    def __init__(self, table: Mapping[str, Flag], given: Mapping[str, Any], notes: Notes, devices: int | None = None):
        self.table = table
        self.flags = dict(given)
        self.notes = notes
        self.devices = devices
        self.used: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.used.add(name)
        return self.flags.get(name, self.table[name].default)

    def given(self, *names: str) -> bool:
        """Whether any of them was given; that counts as use of it."""
        self.used.update(names)
        return any(name in self.flags for name in names)

    def one_of(self, name: str, choices: Mapping[str, Any]) -> Any:
        """The value as `choices` has it; another one is a problem, and the first of them the answer."""
        value = self[name]
        if value in choices:
            return choices[value]
        self.wrong(name, f"expected one of {', '.join(choices)}, got {value}")
        return next(iter(choices.values()))

    def wrong(self, name: str, what: str, hint: str = "") -> None:
        """Note an error of the command line."""
        if name not in self.notes.unread:
            self._note(self.notes.problems, name, what, hint)

    def refuse(self, name: str, why: str) -> None:
        """Note that this value of a flag cannot be had."""
        self._note(self.notes.refusals, name, why)

    def remark(self, name: str, text: str) -> None:
        """Note something to know about a flag."""
        self._note(self.notes.remarks, name, text)

    def _note(self, notes: list[Problem], name: str, what: str, hint: str = "") -> None:
        self.used.add(name)
        problem = Problem(f"--{name}", what, hint)
        if problem not in notes:
            notes.append(problem)


def shown(value: Any) -> str:
    """A flag's value as it is written."""
    if isinstance(value, list):
        return " ".join(str(item) for item in value)
    return "" if value is True else str(value)


def spellings(table: Iterable[Flag]) -> dict[str, Flag]:
    """Every spelling, in small letters with dashes for underscores -> the flag."""
    return {_plain(name): row for row in table for name in (row.name, *row.also)}


def _plain(name: str) -> str:
    return name.replace("_", "-").lower()


def read_words(words: Sequence[Word], table: Mapping[str, Flag], notes: Notes) -> dict[str, Any]:
    """The values of the flags on a command line; the last counts where one is repeated, as in argparse."""
    known = spellings(table.values())
    given: dict[str, Any] = {}
    row, name, values = None, None, []

    def finish() -> None:
        if name is None:
            return
        if row is None and (off := _turned_off(name, known)) is not None and not values:
            given[off.name] = False
        elif row is None:
            notes.problems.append(_unknown(name, known))
        else:
            _take(row, name, values, given, notes)

    for word in words:
        if word.text.startswith("--") and len(word.text) > 2:
            finish()
            text, equals, value = word.text[2:].partition("=")
            row, name = known.get(_plain(text)), Word(text, word.place)
            values = [Word(value, word.place, word.unknown)] if equals else []
        elif name is None:
            what = f"{_of_unknown(word)}stands before the first flag" if word.unknown else "is no flag"
            notes.problems.append(Problem(_where(word.text.replace(UNKNOWN, "…"), word), what))
        else:
            values.append(word)
    finish()
    return given


def _turned_off(name: Word, known: Mapping[str, Flag]) -> Flag | None:
    """--no-NAME of a NAME without a value: Megatron-LM makes one of each switch of its config classes."""
    row = known.get(_plain(name.text).removeprefix("no-"))
    return row if row is not None and row.kind in (bool, list) else None


def _where(text: str, word: Word) -> str:
    return f"{word.place}: {text}" if word.place else text


def _of_unknown(word: Word) -> str:
    return "".join(f"{what}; " for what in word.unknown)


def _unknown(name: Word, known: Mapping[str, Flag]) -> Problem:
    """Nearest names among the flags that are known."""
    names = {spelling.replace("-", "_"): f"--{row.name}" for spelling, row in known.items()}
    hint = did_you_mean(name.text, names)
    for plain, written in names.items():
        hint = hint.replace(f" {plain},", f" {written},").replace(f" {plain} ", f" {written} ")
        hint = hint.replace(f" {plain}?", f" {written}?")
    return Problem(_where(f"--{name.text}", name), "no such flag is known", hint)


def _take(row: Flag, name: Word, values: Sequence[Word], given: dict[str, Any], notes: Notes) -> None:
    where = _where(f"--{row.name}", name)
    unknown = [what for word in values for what in word.unknown]
    complete = row.kind is bool or (row.kind is not list and bool(values) and not values[0].unknown)
    if unknown and complete:
        # What follows a flag that needs no more may be anything, flags among it.
        notes.problems.append(Problem(values[-1].place or where, "; ".join(dict.fromkeys(unknown)), DEFINE))
        return
    if unknown:
        notes.unread.add(row.name)
        notes.problems.append(Problem(where, "; ".join(dict.fromkeys(unknown)), DEFINE))
        return
    texts = [word.text for word in values]
    if row.kind is not list and len(texts) != (row.kind is not bool):
        wanted = "no value" if row.kind is bool else "one value"
        notes.unread.add(row.name)
        notes.problems.append(Problem(where, f"takes {wanted}, got {len(texts)}: {' '.join(texts) or 'none'}"))
        return
    try:
        value = True if row.kind is bool else texts if row.kind is list else row.kind(texts[0])
    except ValueError:
        notes.unread.add(row.name)
        kinds: dict[type, str] = {int: "a whole number", float: "a number"}
        notes.problems.append(Problem(where, f"expected {kinds[row.kind]}, got {texts[0]}"))
        return
    if row.name in given and given[row.name] != value:
        text = f"is given twice; the last counts ({shown(value)}, not {shown(given[row.name])})"
        notes.remarks.append(Problem(f"--{row.name}", text))
    given[row.name] = value
