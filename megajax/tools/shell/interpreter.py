"""Follow the commands of a script with values for its variables. No program is run."""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from megajax.config.budget import Budget, Limits
from megajax.config.errors import UserError
from megajax.tools.shell.commands import Commands, Left
from megajax.tools.shell.conditions import Truth, inverse
from megajax.tools.shell.state import Command, Report, State, is_known, plain
from megajax.tools.shell.syntax import parse
from megajax.tools.shell.tree import (
    Body,
    Case,
    Chain,
    Condition,
    Count,
    For,
    Function,
    Group,
    If,
    Pipeline,
    Simple,
    While,
)
from megajax.tools.shell.words import checked_text

LIMITS = Limits(bytes=2**24, entries=1_000_000)
"""Of the values of all expansions of a script, and of the commands followed."""
COST = 20
"""Entries of the limit that one command counts as."""


@dataclass(frozen=True, slots=True)
class Script:
    """What a script does: its commands, and notes for the user."""

    commands: tuple[Command, ...]
    notes: tuple[str, ...]


def read_script(
    text: str,
    *,
    path: str = "script",
    arguments: Sequence[str] = (),
    defined: Mapping[str, str] | None = None,
    answers: Mapping[str, str] | None = None,
) -> Script:
    """Follow a script.

    path: its name, for $0. arguments: $1, $2, … defined: variables from outside, which override assignments of the
    script. answers: line, or FILE:LINE -> true, false or a word, for conditions that are not known.

    Raises:
        UserError: an unclosed quote or bracket, loops without end, values that become too long, or a condition that
            decides what follows and is not known.
    """
    report = Report(Budget("the script", LIMITS), defined or {}, answers or {})
    state = State(report, path, os.getcwd(), list(arguments))
    follower = Follower(state)
    with suppress(Left):
        follower.run(parse(checked_text(text)))
    if unused := set(report.answers) - report.used_answers:
        raise UserError(f"--assume={unused.pop()}: no condition that is not known is there")
    return Script(tuple(state.commands), tuple(report.notes))


class Follower(Commands):
    """Follows all commands of a script."""

    def run(self, body: Body) -> Truth:
        """Follow commands: the status of the last one."""
        status: Truth = True
        for node in body:
            self.state.report.budget.spend(COST)
            status = METHODS[type(node)](self, node)
        return status

    # Conditions

    def truth(self, condition: Condition) -> Truth:
        """The value of a condition. Variables that are not set count as empty, which a note says."""
        missing, self.state.missing = self.state.missing, []
        try:
            status = self.run(condition.body)
            names = dict.fromkeys(self.state.missing)
        finally:
            self.state.missing = missing
        if status is None:
            return self.answer(condition.line)
        if names:
            variable = next(iter(names)).removeprefix("$")
            change = "the script's arguments" if variable.startswith("argument") else f"--define={variable}=VALUE"
            self.state.report.note(
                f"{self.state.place(condition.line)}: {' and '.join(names)} is not set, so {condition.text} is "
                f"{'true' if status else 'false'}; {change} changes it"
            )
        return status

    def answer(self, line: int) -> Truth:
        """What --assume says of a line."""
        text = self.state.answer(line)
        if text not in ("true", "false", None):
            raise UserError(f"--assume={self.state.answer_key(line)}={text}: expected true or false")
        return None if text is None else text == "true"

    def follow_ways(self, line: int, text: str, ways: Mapping[str, Callable[[], object]]) -> Truth:
        """Follow each way of a condition that is not known, and keep what they have in common.

        ways: answer -> follows the commands of that way.
        """
        outer, note = self.state, self.state.report.note
        place, key = f"{outer.place(line)}: {plain(text)}", outer.answer_key(line)
        choose = " or ".join(f"--assume={key}={answer}" for answer in ways)
        states, ends, trains = {}, [], False
        for answer, way in ways.items():
            with self.inside(outer.fork()) as state:
                try:
                    way()
                    states[answer] = state
                except Left as left:
                    if left.kind != "exit":
                        message = f"{outer.place(line)}: it is not known whether {plain(text)} is true: {choose}"
                        raise UserError(message) from None
                    ends.append(answer)
            trains = trains or any(".py" in word.text for command in state.commands for word in command.words)
            outer.commands += [command for command in state.commands if command not in outer.commands]
        if trains:
            note(f"{place} is not known and decides on a command: {choose}")
        if not states:
            raise Left("exit")
        if ends and not trains:
            end = " or ".join(ends)
            note(f"{place} is taken not to be {end}, as the script ends there: --assume={key}={end}")
        outer.join(states, f"{place} is not known and decides", choose)
        return None

    # Compound commands

    def chain(self, node: Chain) -> Truth:
        """&& and ||. In a condition, what is not known stays so; elsewhere both ways are followed."""
        first, *rest = node.commands
        is_condition = self.state.missing is not None
        text = "the command before && or ||"
        status = self.run((first,)) if is_condition else self.truth(Condition(node.line, (first,), text))
        for operator, command in zip(node.operators, rest, strict=True):
            if status is None and is_condition:
                other = self.run((command,))
                status = other if other is (operator == "||") else None
            elif status is None:
                ways = {"true": lambda: None, "false": lambda: None}
                ways["true" if operator == "&&" else "false"] = lambda command=command: self.run((command,))
                self.follow_ways(node.line, f"the status of the command before {operator}", ways)
            elif status == (operator == "&&"):
                status = self.run((command,))
        return status

    def pipeline(self, node: Pipeline) -> Truth:
        """Commands joined by |."""
        status: Truth = True
        for command in node.commands:
            status = self.run((command,))
        if len(node.commands) > 1:
            self.state.output.append(None)
            status = None
        return inverse(status) if node.inverse else status

    def group(self, node: Group) -> Truth:
        """{ } and ( )."""
        return self.subshell(node.body) if node.subshell else self.run(node.body)

    def if_command(self, node: If) -> Truth:
        """if, elif, else."""
        status = self.truth(node.condition)
        if status is None:
            ways = {"true": lambda: self.run(node.body), "false": lambda: self.run(node.otherwise)}
            return self.follow_ways(node.condition.line, node.condition.text, ways)
        return self.run(node.body if status else node.otherwise)

    def while_command(self, node: While) -> Truth:
        """while and until. A loop that changes nothing ends after one turn."""
        while True:
            self.state.report.budget.spend(COST)
            status = self.truth(node.condition)
            status = inverse(status) if node.until else status
            if status is None:
                ways = {"true": lambda: self.turn(node.body), "false": lambda: None}
                return self.follow_ways(node.line, node.condition.text, ways)
            before = (dict(self.state.variables), list(self.state.arguments))
            if not status or not self.turn(node.body) or before == (self.state.variables, self.state.arguments):
                return True

    def turn(self, body: Body) -> bool:
        """One turn of a loop: whether there may be another."""
        try:
            self.run(body)
        except Left as left:
            if left.kind not in ("break", "continue"):
                raise
            if left.levels > 1:
                raise Left(left.kind, left.levels - 1) from None
            return left.kind == "continue"
        return True

    def for_command(self, node: For) -> Truth:
        """for NAME in words."""
        words = ('"$@"',) if node.words is None else node.words
        entries = [entry for word in words for entry in self.words(node.line).fields(word)]

        def follow() -> Truth:
            for entry in entries:
                self.state.assign(node.name, entry)
                if not self.turn(node.body):
                    break
            return True

        status = True if all(map(is_known, entries)) else self.answer(node.line)
        if status is None:
            # One word that is not known may be several, or none.
            ways = {"true": follow, "false": lambda: None}
            return self.follow_ways(node.line, f"the list of for {node.name}", ways)
        return status and follow()

    def count(self, node: Count) -> Truth:
        """for ((;;))."""
        words, (first, condition, step) = self.words(node.line), node.parts
        words.number(first)
        while True:
            self.state.report.budget.spend(COST)
            number = words.number(condition) if condition.strip() else 1
            if number is None:
                place = self.state.place(node.line)
                raise UserError(f"{place}: the number of turns of for (({condition})) is not known")
            if number == 0 or not self.turn(node.body):
                return True
            words.number(step)

    def case_command(self, node: Case) -> Truth:
        """case."""
        words, place, missing = self.words(node.line), self.state.place(node.line), self.state.missing
        self.state.missing = []
        value, names, self.state.missing = words.text(node.word), self.state.missing, missing
        if not is_known(value):
            value = self.state.answer(node.line) or value
        if names:
            self.state.report.note(f"{place}: {' and '.join(names)} is not set, so case looks for an empty word")
        if is_known(value):
            for patterns, body in node.branches:
                if any(pattern.match(value) for pattern in map(words.pattern, patterns) if pattern):
                    return self.run(body)
            return True
        ways: dict[str, Callable[[], object]] = {
            words.text(patterns[0]): lambda body=body: self.run(body) for patterns, body in node.branches
        }
        if not any("*" in patterns for patterns, _ in node.branches):
            ways["…"] = lambda: None
        return self.follow_ways(node.line, f"the value of {node.word}", ways)

    def function(self, node: Function) -> Truth:
        """The definition of a function."""
        self.state.functions[node.name] = node.body
        return True


METHODS: Mapping[type, Callable[..., Truth]] = {
    Chain: Follower.chain,
    Pipeline: Follower.pipeline,
    Group: Follower.group,
    If: Follower.if_command,
    While: Follower.while_command,
    For: Follower.for_command,
    Count: Follower.count,
    Case: Follower.case_command,
    Function: Follower.function,
    Simple: Follower.simple,
}
