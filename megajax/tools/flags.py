"""A table of another trainer's flags, each a setting, unnecessary or refused, and command lines read by it."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megajax.config.errors import Problem
from megajax.config.nearest import either, nearest_names

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

    def where(self, text: str) -> str:
        """A text with the place of this word."""
        return f"{self.place}: {text}" if self.place else text


@dataclass(frozen=True, slots=True)
class Mapped:
    """The flag is one setting, or `by` makes the settings it takes part in."""

    settings: tuple[str, ...]
    by: "Callable[[Arguments], Settings] | None" = None
    values: Mapping[str, str] = field(default_factory=dict)
    """Value of the flag -> of the setting; others of a switch leave the setting alone. Empty: the value itself."""


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


def read_table(text: str, functions: "Mapping[str, Callable[[Arguments], Settings]]") -> Iterator[Flag]:
    """The rows of a text as megatron_flags.txt explains it. functions: name -> what makes settings."""
    for line in text[text.index("\n# ") :].replace("\n  ", " ").splitlines():
        names, arrow, answer = line.partition(" => ")
        if arrow:
            start, colon, rest = answer.partition(": ")
            if start in ("refused", "unnecessary"):
                fate = Refused(rest) if start == "refused" else Unnecessary(rest)
            elif colon:
                fate = Mapped(tuple(rest.split()), functions[start])
            else:
                setting, *pairs = answer.split()
                fate = Mapped((setting,), values=dict(pair.split("=") for pair in pairs))
            yield from (_row(token, fate) for token in names.split())


def _row(token: str, fate: Fate) -> Flag:
    typed, equals, value = token.partition("=")
    names, _, written = typed.partition(":")
    name, *also = names.split("|")
    kind = KINDS[written or "list"]
    # A switch that is a setting by itself leaves it alone where it is not given.
    default = False if kind is bool and not (isinstance(fate, Mapped) and fate.by is None and not fate.values) else None
    if equals:
        default = value.split() if kind is list else kind(value)
    return Flag(name, kind, fate, default, tuple(also))


@dataclass
class Arguments:
    """The values of a command line's flags, or their defaults, and notes on what is wrong with them."""

    table: Mapping[str, Flag]
    devices: int | None = None
    """How many share the work, where that is known."""
    flags: dict[str, Any] = field(default_factory=dict)
    """Values of the flags that were given."""
    used: set[str] = field(default_factory=set)
    problems: list[Problem] = field(default_factory=list)
    """What makes no sense: unknown flags, contradictions."""
    refusals: list[Problem] = field(default_factory=list)
    """What makes sense and cannot be had."""
    remarks: list[Problem] = field(default_factory=list)
    """What the user should know of a flag that was mapped."""
    unread: set[str] = field(default_factory=set)
    """Flags whose value could not be read, which is a problem already."""

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

    def single_settings(self) -> Settings:
        """The settings that a flag makes by itself."""
        settings = {}
        for name, row in self.table.items():
            if isinstance(row.fate, Mapped) and row.fate.by is None and (value := self[name]) is not None:
                values = row.fate.values
                if values and row.kind is bool:
                    value = values.get(str(value).lower())
                elif values:
                    value = self.one_of(name, values)
                if value is not None:
                    settings[row.fate.settings[0]] = value
        return settings

    def numbers(self, name: str) -> tuple[int, ...]:
        """Words of a flag as whole numbers; others are a problem, and () the answer."""
        words = self[name]
        if all(word.isdigit() for word in words):
            return tuple(map(int, words))
        self.wrong(name, f"expected whole numbers, got {' '.join(words)}")
        return ()

    def wrong(self, name: str, what: str, hint: str = "") -> None:
        """Note an error of the command line."""
        if name not in self.unread:
            self._note(self.problems, name, what, hint)

    def refuse(self, name: str, why: str) -> None:
        """Note that this value of a flag cannot be had."""
        self._note(self.refusals, name, why)

    def remark(self, name: str, text: str) -> None:
        """Note something to know about a flag."""
        self._note(self.remarks, name, text)

    def _note(self, notes: list[Problem], name: str, what: str, hint: str = "") -> None:
        self.used.add(name)
        problem = Problem(f"--{name}", what, hint)
        if problem not in notes:
            notes.append(problem)

    def written(self, name: str) -> str:
        """A flag as it was given."""
        value = self.flags.get(name, True)
        return f"--no-{name}" if value is False else f"--{name} {shown(value)}".rstrip()

    def read(self, words: Sequence[Word]) -> None:
        """Take the flags of a command line; the last counts where one is repeated, as in argparse."""
        known = spellings(self.table.values())
        name, values = None, []
        for word in (*words, None):
            if word is None or (word.text.startswith("--") and len(word.text) > 2):
                if name is not None:
                    self._take(name, values, known)
                if word is not None:
                    text, equals, value = word.text[2:].partition("=")
                    name = Word(text, word.place)
                    values = [Word(value, word.place, word.unknown)] if equals else []
            elif name is None:
                reasons = "".join(f"{reason}; " for reason in word.unknown)
                what = f"{reasons}stands before the first flag" if word.unknown else "is no flag"
                self.problems.append(Problem(word.where(word.text.replace(UNKNOWN, "…")), what))
            else:
                values.append(word)

    def _take(self, name: Word, values: Sequence[Word], known: Mapping[str, Flag]) -> None:
        plain = _plain(name.text)
        if (row := known.get(plain)) is None:
            # Megatron-LM makes a --no-NAME without a value of each switch of its config classes.
            switch = known.get(plain.removeprefix("no-"))
            if switch is not None and switch.kind in (bool, list) and not values:
                self.flags[switch.name] = False
            else:
                near = nearest_names(name.text, [spelling.replace("-", "_") for spelling in known])
                names = dict.fromkeys(f"--{known[spelling.replace('_', '-')].name}" for spelling in near)
                hint = f"did you mean {either(names)}?" if names else ""
                self.problems.append(Problem(name.where(f"--{name.text}"), "no such flag is known", hint))
            return
        where = name.where(f"--{row.name}")
        unknown = dict.fromkeys(reason for word in values for reason in word.unknown)
        if unknown and (row.kind is bool or (row.kind is not list and not values[0].unknown)):
            # What follows a flag that needs no more may be anything, flags among it.
            self.problems.append(Problem(values[-1].place or where, "; ".join(unknown), DEFINE))
            return
        try:
            value = _value(row, values)
        except ValueError as error:
            self.unread.add(row.name)
            hint = DEFINE if unknown else ""
            self.problems.append(Problem(where, "; ".join(unknown) or str(error), hint))
            return
        if self.flags.get(row.name, value) != value:
            text = f"is given twice; the last counts ({shown(value)}, not {shown(self.flags[row.name])})"
            self.remarks.append(Problem(f"--{row.name}", text))
        self.flags[row.name] = value


def _value(row: Flag, values: Sequence[Word]) -> Any:
    """Raises ValueError for words that are no value of this flag."""
    texts = [word.text for word in values]
    if any(word.unknown for word in values):
        raise ValueError("is not known")
    if row.kind is list:
        return texts
    if len(texts) != (row.kind is not bool):
        wanted = "no value" if row.kind is bool else "one value"
        raise ValueError(f"takes {wanted}, got {len(texts)}: {' '.join(texts) or 'none'}")
    try:
        return row.kind is bool or row.kind(texts[0])
    except ValueError:
        wanted = "a whole number" if row.kind is int else "a number"
        raise ValueError(f"expected {wanted}, got {texts[0]}") from None


def shown(value: Any) -> str:
    """A flag's value as it is written."""
    if isinstance(value, list):
        return " ".join(map(str, value))
    return "" if value is True else str(value)


def spellings(table: Iterable[Flag]) -> dict[str, Flag]:
    """Every spelling, in small letters with dashes for underscores -> the flag."""
    return {_plain(name): row for row in table for name in (row.name, *row.also)}


def _plain(name: str) -> str:
    return name.replace("_", "-").lower()
