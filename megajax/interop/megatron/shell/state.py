"""What a shell knows at one place of a script: variables, arguments, functions; and what its reader reports."""

import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megajax.config.errors import UserError
from megajax.config.read_limits import Budget
from megajax.interop.megatron.flags.reading import UNKNOWN, Word
from megajax.interop.megatron.shell.syntax import Node

FIRST, LAST = 0xF0000, 0xFFFFD
"""Code points that stand for unknown values in texts, one for each reason."""

type Value = tuple[str, ...]
"""The entries of an array. A scalar has one."""


@dataclass(frozen=True, slots=True)
class Command:
    """A command of a script, variables replaced by their values."""

    words: tuple[Word, ...]
    place: str
    """Its line, and its file if that is not the script."""


@dataclass
class Report:
    """What holds for the whole script: limits, reasons of unknown values, notes, answers to conditions."""

    budget: Budget
    defined: Mapping[str, str]
    """Variables from outside. They override assignments of the script."""
    answers: Mapping[str, str]
    """Line, or FILE:LINE -> what to assume of the condition there."""
    reasons: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    used_answers: set[str] = field(default_factory=set)

    def note(self, text: str) -> None:
        """Add a note for the user, once."""
        if text not in self.notes:
            self.notes.append(text)

    def unknown(self, reason: str) -> str:
        """A character that stands for a value that is not known."""
        if reason not in self.reasons:
            self.reasons.append(reason)
            if len(self.reasons) > LAST - FIRST:
                raise UserError("too many unknown values")
        return chr(FIRST + self.reasons.index(reason))

    def reasons_in(self, text: str) -> tuple[str, ...]:
        """The reasons of the unknown values in a text."""
        return tuple(dict.fromkeys(self.reasons[ord(mark) - FIRST] for mark in text if is_mark(mark)))

    def word(self, text: str, place: str) -> Word:
        """A text as a word of a command."""
        return Word("".join(UNKNOWN if is_mark(mark) else mark for mark in text), place, self.reasons_in(text))


def is_mark(character: str) -> bool:
    """Whether a character stands for an unknown value."""
    return FIRST <= ord(character) <= LAST


def is_known(text: str) -> bool:
    """Whether no part of a text is an unknown value."""
    return not any(map(is_mark, text))


def plain(text: str) -> str:
    """A text for messages: … for unknown values, shortened."""
    text = "".join("…" if is_mark(mark) else mark for mark in text)
    return text if len(text) <= 80 else f"{text[:77]}..."


@dataclass
class State:
    """Variables and arguments at one place of a script."""

    report: Report
    script: str
    """$0."""
    folder: str
    """$PWD, and the folder of relative names."""
    arguments: list[str]
    file: str = ""
    """The file of the current line, if it is not the script."""
    variables: dict[str, Value] = field(default_factory=dict)
    exported: set[str] = field(default_factory=set)
    functions: dict[str, Node] = field(default_factory=dict)
    commands: list[Command] = field(default_factory=list)
    output: list[str | None] = field(default_factory=list)
    """What commands print, for $(…); None: the output of a program."""
    missing: list[str] | None = None
    """Names of variables that a condition has taken as unset; None: outside of a condition."""

    def place(self, line: int) -> str:
        """A line, and its file if that is not the script."""
        return f"line {line} of {self.file}" if self.file else f"line {line}"

    def answer_key(self, line: int) -> str:
        """The name of a line in --assume."""
        return f"{posixpath.basename(self.file)}:{line}" if self.file else str(line)

    def answer(self, line: int) -> str | None:
        """What --assume says of a line."""
        key = self.answer_key(line)
        self.report.used_answers |= {key} & set(self.report.answers)
        return self.report.answers.get(key)

    def value(self, name: str) -> Value | None:
        """The value of a variable; None: not set."""
        if name in self.report.defined:
            return (self.report.defined[name],)
        if name in self.variables:
            return self.variables[name]
        shell = {"PWD": self.folder, "BASH_SOURCE": self.file or self.script, "IFS": " \t\n"}
        return (shell[name],) if name in shell else None

    def assign(self, name: str, *value: str) -> None:
        """Set a variable, unless it is given from outside."""
        self.report.budget.spend(len(value), bytes=sum(map(len, value)))
        if name not in self.report.defined:
            self.variables[name] = value

    def missing_value(self, name: str, line: int) -> list[str]:
        """The value of a variable without one: nothing in a condition, otherwise unknown."""
        variable = f"argument {name} of the script" if name.isdigit() else f"${name}"
        if self.missing is not None:
            self.missing.append(variable)
            return []
        return [self.report.unknown(f"{self.place(line)}: {variable} is not known")]

    def fork(self, **fields: Any) -> "State":
        """A copy that can change without changing this one, with other values of some fields."""
        names = ("arguments", "variables", "exported", "functions")
        copies = {name: getattr(self, name).copy() for name in names}
        return replace(self, **copies | {"commands": []} | fields)

    def join(self, states: "Mapping[str, State]", reason: str, choose: str) -> None:
        """Take over the values of the ways of a condition. Where they differ, the value is not known."""
        first, *others = states.values()
        if any(state.arguments != first.arguments for state in others):
            raise UserError(f"{reason} on the script's arguments: {choose}")
        variables: dict[str, Value] = {}
        for name in dict.fromkeys(name for state in states.values() for name in state.variables):
            values = [state.variables.get(name) for state in states.values()]
            value = values[0] or ()
            if any(other != value for other in values):
                texts = [
                    f"{answer}: {plain(' '.join(other)) if other is not None else 'not set'}"
                    for answer, other in zip(states, values, strict=True)
                ]
                unknown = self.report.unknown(f"{reason} on ${name} ({'; '.join(texts)}): {choose}")
                value = (*shared([other or () for other in values]), unknown)
            variables[name] = value
        self.variables, self.arguments, self.folder = variables, first.arguments, first.folder
        for state in states.values():
            self.functions |= state.functions
            self.exported |= state.exported

    def path(self, name: str) -> str:
        """A file name relative to the current folder."""
        return posixpath.normpath(posixpath.join(self.folder, name))


def shared(values: Sequence[Value]) -> Value:
    """What arrays have in common at their start; nothing if one of them is a scalar."""
    columns = list(zip(*values, strict=False)) if all(len(value) > 1 for value in values) else []
    equal = [len(set(column)) == 1 for column in columns]
    return values[0][: [*equal, False].index(False)]
