"""Follow simple commands: assignments, builtins, functions, other scripts, and programs, which are not run."""

import posixpath
import re
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from megajax.config.budget import read_file
from megajax.config.errors import UserError
from megajax.tools.shell import builtin
from megajax.tools.shell.conditions import Truth, evaluate_test
from megajax.tools.shell.state import Command, State, is_known, next_index, plain
from megajax.tools.shell.syntax import DEPTH, NAME, parse
from megajax.tools.shell.tree import Array, Body, Group, Node, Simple
from megajax.tools.shell.words import Words, checked_text

ASSIGNMENT = re.compile(rf"({NAME})(?:\[([^]]*)\])?(\+?)=(.*)", re.DOTALL)
DECLARING = {"export", "declare", "typeset", "readonly", "local"}
SHELLS = {"bash", "sh", "zsh", "dash"}
RUNNERS = SHELLS | {"sbatch", "srun", "salloc", "qsub", "bsub", "mpirun", "mpiexec", "nohup", "exec", "time", "env"}
"""Commands whose arguments may name a script."""
SILENT = {"echo", "printf", "cat", "grep", "sed", "awk", "tee", "cp", "mv", "rm", "ls", "git", "which", "touch", "test"}
"""Commands whose arguments are no commands."""
SCRIPT_NAME = re.compile(r".*\.(?:sh|bash|sbatch|slurm)")


class Left(Exception):
    """exit, return, break or continue."""

    def __init__(self, kind: str, levels: int = 1):
        self.kind, self.levels = kind, levels


class Commands(ABC):
    """Follows the simple commands of one state of a shell. A status is True, False, or None if it is not known."""

    def __init__(self, state: State, depth: int = 0, output: list[str] | None = None):
        self.state, self.depth, self.output = state, depth, output
        if depth > DEPTH:
            raise UserError(f"more than {DEPTH} levels of functions and scripts")

    @abstractmethod
    def run(self, body: Body) -> Truth:
        """Follow commands: the status of the last one."""

    def words(self, line: int) -> Words:
        """The expansion of words of a line."""
        return Words(self.state, line, self.substitute)

    def substitute(self, source: str, line: int) -> str | None:
        """The output of $(source); None: a program makes it."""
        inner = type(self)(self.state.fork(), self.depth + 1, [])
        with suppress(Left):
            inner.run(parse(source, line))
        return None if inner.output is None else "".join(inner.output).rstrip("\n")

    def simple(self, node: Simple) -> Truth:
        """Assignments, then a command."""
        words, rest = self.words(node.line), list(node.words)
        first = rest[0] if rest and isinstance(rest[0], str) else ""
        if first in DECLARING:
            return self.declare(node)
        while rest and (isinstance(rest[0], Array) or ASSIGNMENT.fullmatch(rest[0])):
            self.assign(rest.pop(0), node.line)
        if not rest:
            return True
        fields = [field for word in rest if isinstance(word, str) for field in words.fields(word)]
        with self.output_to(node):
            return self.call(fields, node) if fields else True

    @contextmanager
    def output_to(self, node: Simple) -> Generator[None]:
        """Keep what a command writes to a file out of $(…)."""
        output, self.output = self.output, [] if node.output and self.output is not None else self.output
        yield
        self.output = output if node.output else self.output

    def declare(self, node: Simple) -> Truth:
        """export, local, declare, readonly and their flags."""
        flags = ""
        for word in node.words[1:]:
            if isinstance(word, str) and word.startswith(("-", "+")):
                flags += word
            elif isinstance(word, Array) or ASSIGNMENT.fullmatch(word):
                name = self.assign(word, node.line)
                self.state.exported |= {name} if node.words[0] == "export" or "x" in flags else set()
            elif node.words[0] == "export":
                self.state.exported.add(self.words(node.line).text(word))
            elif node.words[0] == "local":
                self.state.assign(word, {})
        return True

    def assign(self, word: str | Array, line: int) -> str:
        """NAME=value, NAME+=value, NAME[index]=value or NAME=(…): the name."""
        words = self.words(line)
        match = ASSIGNMENT.fullmatch(word if isinstance(word, str) else word.start)
        assert match is not None
        name, index, adds, text = match.groups()
        previous = self.state.value(name) or {}
        if isinstance(word, Array):
            value = dict(previous) if adds else {}
            start = next_index(value)
            for entry in word.entries:
                if match := re.fullmatch(r"\[([^]]+)\]=(.*)", entry, re.DOTALL):
                    value[words.text(match[1])] = words.text(match[2])
                    continue
                for field in words.fields(entry):
                    value[str(start)] = field
                    start += 1
        else:
            key = "0" if index is None else words.subscript(f"[{index}]")[0]
            # NAME=value replaces a scalar, and the first entry of an array.
            value = dict(previous) if index is not None or adds or len(previous) > 1 else {}
            value[key] = (previous.get(key, "") if adds else "") + words.text(text)
        self.state.assign(name, value)
        return name

    def call(self, fields: list[str], node: Simple) -> Truth:
        """A builtin, a function, a script, or a program."""
        name = fields[0]
        match name:
            case "[" | "test":
                tokens = fields[1:-1] if name == "[" else fields[1:]
                return evaluate_test(tokens, self.words(node.line), extended=False)
            case "exit" | "return":
                raise Left(name)
            case "break" | "continue":
                raise Left(name, int(fields[1]) if fields[1:] and fields[1].isdigit() else 1)
            case "." | "source":
                return self.source(fields[1:], node.line)
            case "eval":
                return self.nested(" ".join(fields[1:]), node.line)
        if name in self.state.functions:
            return self.function_call(self.state.functions[name], fields[1:])
        if name in builtin.COMMANDS:
            return builtin.COMMANDS[name](self, fields[1:], node)
        return self.program(fields, node)

    def function_call(self, body: Node, arguments: list[str]) -> Truth:
        """Follow a function. Its local variables end with it."""
        local = {
            word if isinstance(word, str) else word.start
            for command in (body.body if isinstance(body, Group) else ())
            if isinstance(command, Simple) and command.words[:1] == ("local",)
            for word in command.words[1:]
        }
        names = {re.split(r"[\[+=]", word)[0] for word in local}
        before = {name: self.state.variables.get(name) for name in names}
        outer, self.state.arguments = self.state.arguments, arguments
        follower = type(self)(self.state, self.depth + 1, self.output)
        try:
            return follower.run((body,))
        except Left as left:
            if left.kind != "return":
                raise
            return None
        finally:
            self.output, self.state.arguments = follower.output, outer
            for name, value in before.items():
                self.state.variables.pop(name, None)
                if value is not None:
                    self.state.variables[name] = value

    def source(self, fields: list[str], line: int) -> Truth:
        """Follow another file in this shell."""
        if not fields:
            return True
        content = self.content(fields[0], line)
        if content is None:
            return None
        outer, outer_arguments = self.state.file, self.state.arguments
        self.state.file = fields[0]
        self.state.arguments = fields[1:] or outer_arguments
        try:
            return type(self)(self.state, self.depth + 1, self.output).run(parse(content))
        except UserError as error:
            raise UserError(f"{fields[0]}, {error}") from error
        except Left as left:
            if left.kind != "return":
                raise
            return None
        finally:
            self.state.file = outer
            if fields[1:]:
                self.state.arguments = outer_arguments

    def content(self, name: str, line: int) -> str | None:
        """The text of a script that this one runs, from the current folder or from that of the script."""
        place = self.state.place(line)
        if name in self.state.files:
            return self.state.files[name]
        reason = "; ".join(self.state.report.reasons_in(name)) or "there is no such file"
        if is_known(name):
            beside = posixpath.join(posixpath.dirname(self.state.script), posixpath.basename(name))
            for path in dict.fromkeys([self.state.path(name), self.state.path(beside)]):
                if Path(path).is_file():
                    try:
                        content = checked_text(read_file(path).decode("utf-8"))
                    except (OSError, UnicodeDecodeError) as error:
                        raise UserError(f"{place}: {path} cannot be read: {error}") from error
                    self.state.report.note(f"{place}: {plain(path)} is read too")
                    return content
        self.state.report.note(f"{place}: {plain(name)} is not read ({reason}): give its variables with --define")
        return None

    def nested(self, text: str, line: int, *, arguments: Sequence[str] = (), is_new: bool = False) -> Truth:
        """Follow the text of eval, bash -c or a here-document. is_new: in a shell of its own."""
        state = self.state
        if is_new:
            state = self.state.fork()
            state.arguments = list(arguments)
        try:
            return type(self)(state, self.depth + 1, self.output).run(parse(text, line))
        except Left:
            if not is_new:
                raise
            return None
        finally:
            if is_new:
                self.state.commands += state.commands

    def program(self, fields: list[str], node: Simple) -> Truth:
        """A program: a script that can be read, or a command to report."""
        self.output = None
        name = posixpath.basename(fields[0])
        if name in SILENT:
            if name == "cat" and node.document and node.output:
                self.state.files[self.words(node.line).text(node.output)] = self.document_text(node)
            return None
        if node.document and name in RUNNERS:
            return self.nested(self.document_text(node), node.line, is_new=True)
        place = next((number for number, field in enumerate(fields) if SCRIPT_NAME.fullmatch(field)), None)
        if place is not None and (name in RUNNERS or place == 0 or posixpath.basename(fields[place - 1]) in SHELLS):
            return self.script(fields[place], fields[place + 1 :], node.line)
        quoted = next((field for field in fields if re.search(r"\.py\s", field)), None)
        if quoted is not None:
            return self.nested(re.sub(r"^--?\w+=", "", quoted), node.line, is_new=True)
        where = self.state.place(node.line)
        self.state.commands.append(Command(tuple(self.state.report.word(field, where) for field in fields), where))
        return None

    def script(self, name: str, arguments: list[str], line: int) -> Truth:
        """Another script in a shell of its own: it sees the exported variables."""
        content = self.content(name, line)
        if content is None:
            return None
        state = self.state.fork()
        state.variables = {key: value for key, value in state.variables.items() if key in state.exported}
        state.functions, state.arguments, state.script, state.file = {}, arguments, name, name
        try:
            with suppress(Left):
                type(self)(state, self.depth + 1).run(parse(content))
        except UserError as error:
            raise UserError(f"{name}, {error}") from error
        self.state.commands += state.commands
        return None

    def document_text(self, node: Simple) -> str:
        """The text of a command's here-document."""
        assert node.document is not None
        return self.words(node.line).document(node.document.text) if node.document.expands else node.document.text
