"""Follow the commands of a script with values for its variables. No program is run."""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from megajax.config.budget import Budget, Limits
from megajax.config.errors import UserError
from megajax.tools.shell.commands import Commands, Left
from megajax.tools.shell.conditions import Truth, evaluate_test, inverse
from megajax.tools.shell.state import Command, Report, State, is_known, plain
from megajax.tools.shell.syntax import parse
from megajax.tools.shell.tree import (
    Arithmetic,
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
    Test,
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


type Way = Callable[[Follower], object]
"""Follows the commands of one answer to a condition."""


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
            names, line = dict.fromkeys(self.state.missing), condition.line
        finally:
            self.state.missing = missing
        if status is None:
            return self.answer(line)
        if names:
            outside = " and ".join(names)
            variable = next(iter(names)).removeprefix("$")
            change = "the script's arguments" if variable.startswith("argument") else f"--define={variable}=VALUE"
            is_true = "true" if status else "false"
            self.state.report.note(
                f"{self.state.place(line)}: {outside} is not set, so {condition.text} is {is_true}; {change} changes it"
            )
        return status

    def answer(self, line: int) -> Truth:
        """What --assume says of a line."""
        key = self.state.answer_key(line)
        text = self.state.report.answers.get(key)
        if text is None:
            return None
        if text not in ("true", "false"):
            raise UserError(f"--assume={key}={text}: expected true or false")
        self.state.report.used_answers.add(key)
        return text == "true"

    def follow_ways(self, line: int, text: str, ways: Mapping[str, Way]) -> Truth:
        """Follow each way of a condition that is not known, and keep what they have in common.

        ways: answer -> follows the commands of that way.
        """
        place, key = self.state.place(line), self.state.answer_key(line)
        choose = " or ".join(f"--assume={key}={answer}" for answer in ways)
        states, ends, trains = {}, [], False
        for answer, way in ways.items():
            state = self.state.fork()
            try:
                way(Follower(state, self.depth, self.output))
                states[answer] = state
            except Left as left:
                if left.kind != "exit":
                    raise UserError(f"{place}: it is not known whether {plain(text)} is true: {choose}") from None
                ends.append(answer)
            trains = trains or any(".py" in word.text for command in state.commands for word in command.words)
            self.state.commands += [command for command in state.commands if command not in self.state.commands]
        note = self.state.report.note
        if trains:
            note(f"{place}: {plain(text)} is not known and decides on a command: {choose}")
        if not states:
            raise Left("exit")
        if ends and not trains:
            end = " or ".join(ends)
            note(f"{place}: {plain(text)} is taken not to be {end}, as the script ends there: --assume={key}={end}")
        self.state.join(states, f"{place}: {plain(text)} is not known and decides", choose)
        return None

    # Compound commands

    def chain(self, node: Chain) -> Truth:
        """&& and ||. In a condition, what is not known stays so; elsewhere both ways are followed."""
        is_condition = self.state.missing is not None
        status = (
            self.run((node.commands[0],))
            if is_condition
            else self.truth(Condition(node.line, (node.commands[0],), "the command before && or ||"))
        )
        for operator, command in zip(node.operators, node.commands[1:], strict=True):
            if status is None and is_condition:
                other = self.run((command,))
                status = other if other is (operator == "||") else None
            elif status is None:
                ways: dict[str, Way] = {"true": lambda way: None, "false": lambda way: None}
                ways["true" if operator == "&&" else "false"] = lambda way, command=command: way.run((command,))
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
            self.output, status = None, None
        return inverse(status) if node.inverse else status

    def group(self, node: Group) -> Truth:
        """{ } and ( )."""
        if not node.subshell:
            return self.run(node.body)
        state = self.state.fork()
        follower = Follower(state, self.depth + 1, self.output)
        try:
            return follower.run(node.body)
        except Left:
            return None
        finally:
            self.state.commands += state.commands
            self.output = follower.output

    def test(self, node: Test) -> Truth:
        """[[ ]]."""
        return evaluate_test(node.words, self.words(node.line), extended=True)

    def arithmetic(self, node: Arithmetic) -> Truth:
        """(( ))."""
        number = self.words(node.line).number(node.text)
        return None if number is None else number != 0

    def if_command(self, node: If) -> Truth:
        """if, elif, else."""
        if not node.branches:
            return self.run(node.otherwise)
        (condition, body), *rest = node.branches
        status = self.truth(condition)
        if status is None:
            others = replace(node, branches=tuple(rest))
            ways = {"true": lambda way: way.run(body), "false": lambda way: way.if_command(others)}
            return self.follow_ways(condition.line, condition.text, ways)
        return self.run(body) if status else self.if_command(replace(node, branches=tuple(rest)))

    def while_command(self, node: While) -> Truth:
        """while and until. A loop that changes nothing ends after one turn."""
        while True:
            self.state.report.budget.spend(COST)
            status = self.truth(node.condition)
            status = inverse(status) if node.until else status
            if status is False:
                return True
            if status is None:
                ways = {"true": lambda way: way.turn(node.body), "false": lambda way: None}
                return self.follow_ways(node.line, node.condition.text, ways)
            before = (dict(self.state.variables), list(self.state.arguments))
            if not self.turn(node.body) or before == (self.state.variables, self.state.arguments):
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
        expand = self.words(node.line).fields
        entries = self.state.arguments if node.words is None else [f for word in node.words for f in expand(word)]
        for entry in list(entries):
            self.state.assign(node.name, {"0": entry})
            if not self.turn(node.body):
                break
        return True

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
        words, key = self.words(node.line), self.state.answer_key(node.line)
        missing, self.state.missing = self.state.missing, []
        value = words.text(node.word)
        names, self.state.missing = self.state.missing, missing
        if not is_known(value) and key in self.state.report.answers:
            self.state.report.used_answers.add(key)
            value = self.state.report.answers[key]
        if names:
            place = self.state.place(node.line)
            self.state.report.note(f"{place}: {' and '.join(names)} is not set, so case looks for an empty word")
        if is_known(value):
            for patterns, body in node.branches:
                if any(re.match(words.pattern(pattern) or "(?!)", value) for pattern in patterns):
                    return self.run(body)
            return True
        ways: dict[str, Way] = {
            words.text(patterns[0]): lambda way, body=body: way.run(body) for patterns, body in node.branches
        }
        if not any("*" in patterns for patterns, _ in node.branches):
            ways["…"] = lambda way: None
        return self.follow_ways(node.line, f"the value of {node.word}", ways)

    def function(self, node: Function) -> Truth:
        """The definition of a function."""
        self.state.functions[node.name] = node.body
        return True


METHODS: Mapping[type, Callable[..., Truth]] = {
    Chain: Follower.chain,
    Pipeline: Follower.pipeline,
    Group: Follower.group,
    Test: Follower.test,
    Arithmetic: Follower.arithmetic,
    If: Follower.if_command,
    While: Follower.while_command,
    For: Follower.for_command,
    Count: Follower.count,
    Case: Follower.case_command,
    Function: Follower.function,
    Simple: Follower.simple,
}
