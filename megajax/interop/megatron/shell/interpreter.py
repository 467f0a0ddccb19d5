"""Follow the commands of a script with values for its variables. No program is run."""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from megajax.config.errors import UserError
from megajax.config.read_limits import Budget, Limits
from megajax.interop.megatron.shell.commands import Commands, Left
from megajax.interop.megatron.shell.state import Command, Report, State, is_known, plain
from megajax.interop.megatron.shell.syntax import Body, Condition, Node, Simple, parse
from megajax.interop.megatron.shell.words import Truth, checked_text, inverse

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
            simple = isinstance(node, Simple)
            status = self.simple(node) if simple else COMPOUND[node.word](self, node.line, *node.parts)
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

    def chain(self, line: int, commands: Sequence[Node], operators: Sequence[str]) -> Truth:
        """&& and ||. In a condition, what is not known stays so; elsewhere both ways are followed."""
        first, *rest = commands
        is_condition = self.state.missing is not None
        text = "the command before && or ||"
        status = self.run((first,)) if is_condition else self.truth(Condition(line, (first,), text))
        for operator, command in zip(operators, rest, strict=True):
            if status is None and is_condition:
                other = self.run((command,))
                status = other if other is (operator == "||") else None
            elif status is None:
                ways = {"true": lambda: None, "false": lambda: None}
                ways["true" if operator == "&&" else "false"] = lambda command=command: self.run((command,))
                self.follow_ways(line, f"the status of the command before {operator}", ways)
            elif status == (operator == "&&"):
                status = self.run((command,))
        return status

    def pipeline(self, line: int, commands: Sequence[Node], is_inverse: bool) -> Truth:
        """Commands joined by |, or ! before a command."""
        status: Truth = True
        for command in commands:
            status = self.run((command,))
        if len(commands) > 1:
            self.state.output.append(None)
            status = None
        return inverse(status) if is_inverse else status

    def if_command(self, line: int, condition: Condition, body: Body, otherwise: Body) -> Truth:
        """if and else; elif is another if in `otherwise`."""
        status = self.truth(condition)
        if status is None:
            ways = {"true": lambda: self.run(body), "false": lambda: self.run(otherwise)}
            return self.follow_ways(condition.line, condition.text, ways)
        return self.run(body if status else otherwise)

    def while_command(self, line: int, condition: Condition, body: Body) -> Truth:
        """while. A loop that changes nothing ends after one turn."""
        while True:
            self.state.report.budget.spend(COST)
            status = self.truth(condition)
            if status is None:
                ways = {"true": lambda: self.turn(body), "false": lambda: None}
                return self.follow_ways(line, condition.text, ways)
            before = (dict(self.state.variables), list(self.state.arguments))
            if not status or not self.turn(body) or before == (self.state.variables, self.state.arguments):
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

    def for_command(self, line: int, name: str, words: Sequence[str], body: Body) -> Truth:
        """for NAME in words."""
        entries = [entry for word in words for entry in self.words(line).fields(word)]

        def follow() -> Truth:
            for entry in entries:
                self.state.assign(name, entry)
                if not self.turn(body):
                    break
            return True

        status = True if all(map(is_known, entries)) else self.answer(line)
        if status is None:
            # One word that is not known may be several, or none.
            ways = {"true": follow, "false": lambda: None}
            return self.follow_ways(line, f"the list of for {name}", ways)
        return status and follow()

    def case_command(self, line: int, word: str, branches: Sequence[tuple[Sequence[str], Body]]) -> Truth:
        """case."""
        words, place, missing = self.words(line), self.state.place(line), self.state.missing
        self.state.missing = []
        value, names, self.state.missing = words.text(word), self.state.missing, missing
        if not is_known(value):
            value = self.state.answer(line) or value
        if names:
            self.state.report.note(f"{place}: {' and '.join(names)} is not set, so case looks for an empty word")
        if is_known(value):
            for patterns, body in branches:
                for pattern in patterns:
                    if (expression := words.pattern(pattern)) is None:
                        raise UserError(f"line {line}: the pattern {pattern} is not supported: write a word or * and ?")
                    if expression.match(value):
                        return self.run(body)
            return True
        ways: dict[str, Callable[[], object]] = {
            words.text(patterns[0]): lambda body=body: self.run(body) for patterns, body in branches
        }
        if not any("*" in patterns for patterns, _ in branches):
            ways["…"] = lambda: None
        return self.follow_ways(line, f"the value of {word}", ways)

    def function(self, line: int, name: str, body: Node) -> Truth:
        """The definition of a function."""
        self.state.functions[name] = body
        return True


COMPOUND: Mapping[str, Callable[..., Truth]] = {
    "&&": Follower.chain,
    "|": Follower.pipeline,
    "{": lambda follower, line, body: follower.run(body),
    "(": lambda follower, line, body: follower.subshell(body),
    "if": Follower.if_command,
    "while": Follower.while_command,
    "for": Follower.for_command,
    "case": Follower.case_command,
    "function": Follower.function,
}
"""Word of a compound command -> the method that follows it."""
