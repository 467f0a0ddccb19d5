"""A table of another trainer's flags, each mapped to settings, unnecessary or refused, and a parser that uses it."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megajax.config.errors import Problem
from megajax.config.hints import either, nearest_names

type Settings = Mapping[str, Any]
"""Dotted names of settings -> values."""


@dataclass(frozen=True, slots=True)
class MappedFlag:
    """The flag is one setting, or `by` computes settings from it and other flags."""

    settings: tuple[str, ...]
    by: "Callable[[Arguments], Settings] | None" = None
    values: Mapping[str, str] = field(default_factory=dict)
    """Value of the flag -> value of the setting. Other values of a switch set nothing. Empty: the value itself."""


@dataclass(frozen=True, slots=True)
class Unnecessary:
    """No setting corresponds to the flag."""

    reason: str


@dataclass(frozen=True, slots=True)
class Refused:
    """This version does not support the flag."""

    reason: str


@dataclass(frozen=True, slots=True)
class Noted:
    """No setting corresponds to the flag, and what happens instead is worth a note."""

    text: str


type Fate = MappedFlag | Unnecessary | Noted | Refused


@dataclass(frozen=True, slots=True)
class MegatronFlag:
    """One flag: name without dashes, kind of its value (bool: no value, list: any number of words), default, fate."""

    name: str
    kind: type
    fate: Fate
    default: Any = None
    also: tuple[str, ...] = ()
    """Other spellings."""


KINDS: Mapping[str, type] = {kind.__name__: kind for kind in (bool, int, float, str, list)}


ANSWERS: Mapping[str, Callable[[str], Fate]] = {"refused": Refused, "unnecessary": Unnecessary, "note": Noted}


def read_table(text: str, functions: "Mapping[str, Callable[[Arguments], Settings]]") -> Iterator[MegatronFlag]:
    """The rows of a text like megatron_flags.txt, which explains the format. functions: for its rows, by name."""
    for line in text[text.index("\n# ") :].replace("\n  ", " ").splitlines():
        names, arrow, answer = line.partition(" => ")
        if arrow:
            start, colon, rest = answer.partition(": ")
            if (kind := ANSWERS.get(start)) is not None:
                fate: Fate = kind(rest)
            elif colon:
                fate = MappedFlag(tuple(rest.split()), functions[start])
            else:
                setting, *pairs = answer.split()
                fate = MappedFlag((setting,), values=dict(pair.split("=") for pair in pairs))
            yield from (_row(token, fate) for token in names.split())


def _row(token: str, fate: Fate) -> MegatronFlag:
    typed, equals, value = token.partition("=")
    names, _, kind_name = typed.partition(":")
    name, *also = names.split("|")
    kind = KINDS[kind_name or "list"]
    # A switch for a single setting leaves the setting unchanged if it is not given.
    default = (
        False if kind is bool and not (isinstance(fate, MappedFlag) and fate.by is None and not fate.values) else None
    )
    if equals:
        default = value.split() if kind is list else kind(value)
    return MegatronFlag(name, kind, fate, default, tuple(also))


@dataclass
class Arguments:
    """The values of a command line's flags, or their defaults, and notes on them."""

    table: Mapping[str, MegatronFlag]
    devices: int | None = None
    """Number of devices; None: unknown."""
    flags: dict[str, Any] = field(default_factory=dict)
    """Values of the flags that were given."""
    used: set[str] = field(default_factory=set)
    problems: list[Problem] = field(default_factory=list)
    """Errors of the command line: unknown flags, contradictions."""
    refusals: list[Problem] = field(default_factory=list)
    """Valid flags that this version does not support."""
    remarks: list[Problem] = field(default_factory=list)
    """Notes to the user on flags that were mapped."""
    unread: set[str] = field(default_factory=set)
    """Flags with an invalid value, which is among the problems already."""

    def __getitem__(self, name: str) -> Any:
        self.used.add(name)
        return self.flags.get(name, self.table[name].default)

    def is_given(self, *names: str) -> bool:
        """Whether any of the flags was given. Marks them as used."""
        self.used.update(names)
        return any(name in self.flags for name in names)

    def one_of(self, name: str, choices: Mapping[str, Any]) -> Any:
        """The entry of `choices` for the flag's value. An unknown value is a problem; the result is the first entry."""
        value = self[name]
        if value in choices:
            return choices[value]
        self.problem(name, f"expected one of {', '.join(choices)}, got {value}")
        return next(iter(choices.values()))

    def single_settings(self) -> Settings:
        """The settings of flags that are one setting each."""
        settings = {}
        for name, row in self.table.items():
            if isinstance(row.fate, MappedFlag) and row.fate.by is None and (value := self[name]) is not None:
                values = row.fate.values
                if values and row.kind is bool:
                    value = values.get(str(value).lower())
                elif values:
                    value = self.one_of(name, values)
                if value is not None:
                    settings[row.fate.settings[0]] = value
        return settings

    def numbers(self, name: str) -> tuple[int, ...]:
        """The values of a flag as whole numbers. Other values are a problem; the result is then ()."""
        texts = self[name]
        if all(word.isdigit() for word in texts):
            return tuple(map(int, texts))
        self.problem(name, f"expected whole numbers, got {' '.join(texts)}")
        return ()

    def problem(self, name: str, message: str, hint: str = "") -> None:
        """Record an error of the command line."""
        if name not in self.unread:
            self._note(self.problems, name, message, hint)

    def refuse(self, name: str, message: str) -> None:
        """Record that this version does not support a flag's value."""
        self._note(self.refusals, name, message)

    def remark(self, name: str, message: str) -> None:
        """Record a note to the user on a flag."""
        self._note(self.remarks, name, message)

    def _note(self, notes: list[Problem], name: str, message: str, hint: str = "") -> None:
        self.used.add(name)
        problem = Problem(f"--{name}", message, hint)
        if problem not in notes:
            notes.append(problem)

    def flag_text(self, name: str) -> str:
        """A flag and its value, as on a command line."""
        value = self.flags.get(name, True)
        return f"--no-{name}" if value is False else f"--{name} {value_text(value)}".rstrip()

    def parse(self, argv: Sequence[str]) -> None:
        """Parse a command line. The last value of a repeated flag counts, as in argparse."""
        rows = spellings(self.table.values())
        name, values = None, []
        for word in (*argv, None):
            if word is None or (word.startswith("--") and len(word) > 2):
                if name is not None:
                    self._set_flag(name, values, rows)
                if word is not None:
                    name, equals, value = word[2:].partition("=")
                    values = [value] if equals else []
            elif name is None:
                self.problems.append(Problem(word, "is not a flag"))
            else:
                values.append(word)

    def _set_flag(self, name: str, values: Sequence[str], rows: Mapping[str, MegatronFlag]) -> None:
        plain = _plain(name)
        if (row := rows.get(plain)) is None:
            # Megatron-LM adds a --no-NAME without a value for each switch of its config classes.
            switch = rows.get(plain.removeprefix("no-"))
            if switch is not None and switch.kind in (bool, list) and not values:
                self.flags[switch.name] = False
            else:
                similar = nearest_names(name, [spelling.replace("-", "_") for spelling in rows])
                names = dict.fromkeys(f"--{rows[spelling.replace('_', '-')].name}" for spelling in similar)
                hint = f"did you mean {either(names)}?" if names else ""
                self.problems.append(Problem(f"--{name}", "is not a known flag", hint))
            return
        try:
            value = _value(row, values)
        except ValueError as error:
            self.unread.add(row.name)
            self.problems.append(Problem(f"--{row.name}", str(error)))
            return
        if self.flags.get(row.name, value) != value:
            text = f"is given twice; the last one counts ({value_text(value)}, not {value_text(self.flags[row.name])})"
            self.remarks.append(Problem(f"--{row.name}", text))
        self.flags[row.name] = value


def needed(args: Arguments, name: str, instead: str = "") -> int:
    """The value of a required flag. A missing one is a problem; the result is then 1."""
    if args[name] is None:
        args.problem(name, "must be given" + (f", or --{instead}" if instead else ""))
        return 1
    return args[name]


def _value(row: MegatronFlag, texts: Sequence[str]) -> Any:
    """The value of a flag. Raises ValueError for words that are not valid values of it."""
    if row.kind is list:
        return list(texts)
    if len(texts) != (row.kind is not bool):
        expected = "no value" if row.kind is bool else "one value"
        raise ValueError(f"takes {expected}, got {len(texts)}: {' '.join(texts) or 'none'}")
    try:
        return row.kind is bool or row.kind(texts[0])
    except ValueError:
        expected = "a whole number" if row.kind is int else "a number"
        raise ValueError(f"expected {expected}, got {texts[0]}") from None


def value_text(value: Any) -> str:
    """A flag's value as on a command line."""
    if isinstance(value, list):
        return " ".join(map(str, value))
    return "" if value is True else str(value)


def spellings(table: Iterable[MegatronFlag]) -> dict[str, MegatronFlag]:
    """Every spelling, in lower case with dashes for underscores -> the flag."""
    return {_plain(name): row for row in table for name in (row.name, *row.also)}


def _plain(name: str) -> str:
    return name.replace("_", "-").lower()
