"""Follow simple commands: assignments, builtins, functions, other scripts, and programs, which are not run."""

import posixpath
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from megajax.config.errors import UserError
from megajax.config.read_limits import read_file
from megajax.interop.megatron.shell.state import Command, State, Value, is_known, plain
from megajax.interop.megatron.shell.syntax import DEPTH, NAME, Body, Simple, array_entries, parse
from megajax.interop.megatron.shell.words import Test, Truth, Words, checked_text

ASSIGNMENT = re.compile(rf"({NAME})(?:\[([^]]*)\])?(\+?)=(.*)", re.DOTALL)
DECLARING = {"export", "declare", "typeset", "readonly", "local"}
SHELLS = {"bash", "sh", "zsh", "dash"}
RUNNERS = SHELLS | {"sbatch", "srun", "salloc", "qsub", "bsub", "mpirun", "mpiexec", "nohup", "exec", "time", "env"}
"""Commands whose arguments may name a script."""
SILENT = {"cat", "grep", "sed", "awk", "tee", "cp", "mv", "rm", "ls", "git", "which", "touch"}
"""Commands whose arguments are no commands."""
SCRIPT_NAME = re.compile(r".*\.(?:sh|bash|sbatch|slurm)")


class Left(Exception):
    """exit, return, break or continue."""

    def __init__(self, kind: str, levels: int = 1):
        self.kind, self.levels = kind, levels


class Commands(ABC):
    """Follows the simple commands of a shell. A status is True, False, or None if it is not known."""

    def __init__(self, state: State):
        self.state, self.depth = state, 0
        self.locals: list[dict[str, Value | None]] = []
        """For each function that runs, its local variables and their values outside."""

    @abstractmethod
    def run(self, body: Body) -> Truth:
        """Follow commands: the status of the last one."""

    def refuse(self, node: Simple, name: str) -> NoReturn:
        """Raise UserError for a construct that is not supported."""
        raise UserError(f"line {node.line}: {name} is not supported: write its result into the script")

    @contextmanager
    def inside(self, state: State) -> Generator[State]:
        """Follow commands with another state, one level deeper."""
        outer, self.state, self.depth = self.state, state, self.depth + 1
        try:
            if self.depth > DEPTH:
                raise UserError(f"more than {DEPTH} levels of functions and scripts")
            yield state
        finally:
            self.state, self.depth = outer, self.depth - 1

    def subshell(self, body: Body, **fields: Any) -> Truth:
        """Follow commands in a shell of their own, with other values of some fields of the state."""
        commands = self.state.commands
        with self.inside(self.state.fork(**fields)) as state:
            try:
                return self.run(body)
            except Left:
                return None
            finally:
                commands += state.commands

    def follow(self, body: Body, arguments: list[str] | None, file: str) -> Truth:
        """Follow commands up to their return; arguments: their own, None: those of this shell."""
        state, outer = self.state, self.state.arguments
        outer_file, state.file = state.file, file
        state.arguments = outer if arguments is None else arguments
        try:
            with self.inside(state):
                return self.run(body)
        except Left as left:
            if left.kind != "return":
                raise
            return None
        finally:
            state.file = outer_file
            state.arguments = state.arguments if arguments is None else outer

    def words(self, line: int) -> Words:
        """The expansion of words of a line."""
        return Words(self.state, line, self.substitute)

    def substitute(self, source: str, line: int) -> str | None:
        """The output of $(source); None: a program makes it."""
        with suppress(Left), self.inside(self.state.fork(output=(output := list[str | None]()))):
            self.run(parse(source, line))
        return None if None in output else "".join(map(str, output)).rstrip("\n")

    def simple(self, node: Simple) -> Truth:
        """Assignments, then a command."""
        words, state, rest = self.words(node.line), self.state, list(node.words)
        if rest[:1] == ["[["]:
            return Test(rest[1:], words, extended=True).value()
        if rest[:1] == ["(("]:
            number = words.number(rest[1])
            return None if number is None else number != 0
        if rest and rest[0] in DECLARING:
            return self.declare(node)
        while rest and ASSIGNMENT.fullmatch(rest[0]):
            self.assign(rest.pop(0), node)
        fields = [field for word in rest for field in words.fields(word)]
        output = state.output
        state.output = [] if node.output else output
        try:
            return self.call(fields, node) if fields else True
        finally:
            state.output = output

    def call(self, fields: list[str], node: Simple) -> Truth:
        """A function, a builtin, or a program."""
        if fields[0] in self.state.functions:
            self.locals.append({})
            try:
                return self.follow((self.state.functions[fields[0]],), fields[1:], self.state.file)
            finally:
                for name, value in self.locals.pop().items():
                    self.state.variables.pop(name, None)
                    if value is not None:
                        self.state.variables[name] = value
        return BUILTINS.get(fields[0], Commands.program)(self, fields, node)

    def declare(self, node: Simple) -> Truth:
        """export, local, declare, readonly and their flags."""
        command, flags = node.words[0], "x" if node.words[0] == "export" else ""
        for word in node.words[1:]:
            name = re.split(r"[\[+=]", word)[0]
            if word.startswith(("-", "+")):
                flags += word
                if re.search("[An]", word) and command != "export":
                    self.refuse(node, f"{command} {word}")
                continue
            if self.locals and command not in ("export", "readonly"):
                self.locals[-1].setdefault(name, self.state.variables.get(name))
            if ASSIGNMENT.fullmatch(word):
                self.assign(word, node)
            elif command == "local":
                self.state.assign(name)
            if "x" in flags:
                self.state.exported.add(self.words(node.line).text(name))
        return True

    def assign(self, word: str, node: Simple) -> None:
        """NAME=value, NAME+=value, NAME[index]=value or NAME=(…)."""
        match = ASSIGNMENT.fullmatch(word)
        assert match is not None
        name, index, adds, text = match.groups()
        words, value = self.words(node.line), self.state.value(name) or ()
        if text.startswith("("):
            entries = array_entries(text, node.line)
            if any(re.match(r"\[[^]]*\]=", entry) for entry in entries):
                self.refuse(node, f"an array with indices, {name},")
            fields = [field for entry in entries for field in words.fields(entry)]
            return self.state.assign(name, *(value if adds else ()), *fields)
        # NAME=value replaces a scalar, and the first entry of an array.
        place = 0 if index is None else words.number(words.text(index))
        if place is None or not -len(value) <= place <= len(value):
            self.refuse(node, f"the index of {name}[{index}]")
        place += len(value) if place < 0 else 0
        previous = "".join(value[place : place + 1]) if adds else ""
        self.state.assign(name, *value[:place], previous + words.text(text), *value[place + 1 :])

    def script(self, name: str, node: Simple, follow: Callable[[Body], Truth]) -> Truth:
        """Follow another file; `follow` has its commands."""
        content = self.content(name, node.line)
        if content is None:
            return None
        try:
            return follow(parse(content))
        except UserError as error:
            raise UserError(f"{name}, {error}") from error

    def content(self, name: str, line: int) -> str | None:
        """The text of a script that this one runs, from the current folder or from that of the script."""
        place, state = self.state.place(line), self.state
        if is_known(name):
            beside = posixpath.join(posixpath.dirname(state.script), posixpath.basename(name))
            for path in (state.path(name), state.path(beside)):
                if Path(path).is_file():
                    try:
                        content = checked_text(read_file(path).decode("utf-8"))
                    except (OSError, UnicodeDecodeError) as error:
                        raise UserError(f"{place}: {path} cannot be read: {error}") from error
                    state.report.note(f"{place}: {path} is read too")
                    return content
        reason = "; ".join(state.report.reasons_in(name)) or "there is no such file"
        state.report.note(f"{place}: {plain(name)} is not read ({reason}): give its variables with --define")
        return None

    def program(self, fields: list[str], node: Simple) -> Truth:
        """A program: a script that can be read, or a command to report."""
        state, name = self.state, posixpath.basename(fields[0])
        state.output.append(None)
        document = self.words(node.line).document(node.document) if node.document else None
        if name in SILENT:
            return None
        if document is not None and name in RUNNERS:
            return self.subshell(parse(document, node.line), arguments=[])
        place = next((number for number, field in enumerate(fields) if SCRIPT_NAME.fullmatch(field)), None)
        if place is not None and (name in RUNNERS or place == 0 or posixpath.basename(fields[place - 1]) in SHELLS):
            file, arguments = fields[place], fields[place + 1 :]
            variables = {key: value for key, value in state.variables.items() if key in state.exported}
            shell = {"variables": variables, "functions": {}, "arguments": arguments, "script": file, "file": file}
            self.script(file, node, lambda body: self.subshell(body, **shell))
            return None
        quoted = next((field for field in fields if re.search(r"\.py\s", field)), None)
        if quoted is not None:
            return self.subshell(parse(re.sub(r"^--?\w+=", "", quoted), node.line), arguments=[])
        where = state.place(node.line)
        state.commands.append(Command(tuple(state.report.word(field, where) for field in fields), where))
        return None

    # Builtins

    def test(self, fields: list[str], node: Simple) -> Truth:
        """[ and test."""
        tokens = fields[1:-1] if fields[0] == "[" else fields[1:]
        return Test(tokens, self.words(node.line), extended=False).value()

    def leave(self, fields: list[str], node: Simple) -> Truth:
        """exit, return, break, continue."""
        raise Left(fields[0], int(fields[1]) if fields[1:] and fields[1].isdigit() else 1)

    def source(self, fields: list[str], node: Simple) -> Truth:
        """source: another file in this shell."""
        name = "".join(fields[1:2])
        return self.script(name, node, lambda body: self.follow(body, fields[2:] or None, name))

    def eval(self, fields: list[str], node: Simple) -> Truth:
        """eval."""
        with self.inside(self.state):
            return self.run(parse(" ".join(fields[1:]), node.line))

    def echo(self, fields: list[str], node: Simple) -> Truth:
        """echo."""
        self.state.output.append(" ".join(field for field in fields[1:] if field not in ("-n", "-e", "-ne")) + "\n")
        return True

    def printf(self, fields: list[str], node: Simple) -> Truth:
        """printf [-v NAME] format values."""
        name = fields[2] if fields[1:2] == ["-v"] and len(fields) > 3 else ""
        form, *values = [*fields, ""][3 if name else 1 :]
        text = re.sub(r"%[sd]", lambda _: values.pop(0) if values else "", form.replace("\\n", "\n"))
        if values[:-1] or "%" in text.replace("%%", ""):
            text = self.words(node.line).unknown("the output of printf is not known")
        if name:
            self.state.assign(name, text)
        else:
            self.state.output.append(text)
        return True

    def shift(self, fields: list[str], node: Simple) -> Truth:
        """shift [count]."""
        count = int(fields[1]) if fields[1:] and fields[1].isdigit() else 1
        if count > len(self.state.arguments):
            return False
        del self.state.arguments[:count]
        return True

    def set(self, fields: list[str], node: Simple) -> Truth:
        """set [options] [-- arguments]."""
        if "--" in fields:
            self.state.arguments = fields[fields.index("--") + 1 :]
        elif fields[1:] and not fields[1].startswith(("-", "+")):
            self.state.arguments = fields[1:]
        return True

    def unset(self, fields: list[str], node: Simple) -> Truth:
        """unset names."""
        for field in fields[1:]:
            if "[" in field:
                self.refuse(node, f"unset {field}")
            self.state.variables.pop(field, None)
        return True

    def let(self, fields: list[str], node: Simple) -> Truth:
        """let expressions."""
        number = [self.words(node.line).number(field) for field in fields[1:]][-1:]
        return None if number in ([], [None]) else number != [0]

    def read(self, fields: list[str], node: Simple) -> Truth:
        """read and mapfile: from <<< a text that is known, otherwise not known."""
        words, document = self.words(node.line), node.document
        names = [field for field in fields[1:] if re.fullmatch(NAME, field)]
        if document is None or document.kind != "word" or self.state.value("IFS") != (" \t\n",):
            for name in names:
                self.state.assign(name, words.unknown(f"${name} is read from outside"))
            return None
        text, is_array = words.document(document), any(re.fullmatch(r"-\w*a", field) for field in fields)
        for number, name in enumerate(names):
            entries = text.split() if is_array else text.split(None, len(names) - 1)[number : number + 1] or [""]
            self.state.assign(name, *entries)
        return True

    def change_folder(self, fields: list[str], node: Simple) -> Truth:
        """cd, pushd."""
        target = fields[-1] if fields[1:] else ""
        self.state.folder = self.state.path(target) if is_known(target) else target
        return True

    def path(self, fields: list[str], node: Simple) -> Truth:
        """pwd, dirname, basename, and realpath, which does not follow links here."""
        names = [field for field in fields[1:] if not field.startswith("-")]
        if fields[0] == "pwd":
            names = [self.state.folder]
        if not names:
            self.state.output.append(None)
            return None
        path = self.state.path(names[0])
        if fields[0] == "dirname":
            path = posixpath.dirname(names[0].rstrip("/")) or "."
        elif fields[0] == "basename":
            path = posixpath.basename(names[0].rstrip("/")).removesuffix("".join(names[1:2]))
        self.state.output.append(f"{path}\n")
        return True

    def succeed(self, fields: list[str], node: Simple) -> Truth:
        """A command without an effect on values, and false."""
        return fields[0] != "false"


BUILTINS: Mapping[str, Callable[[Commands, list[str], Simple], Truth]] = {
    **dict.fromkeys(("[", "test"), Commands.test),
    **dict.fromkeys(("exit", "return", "break", "continue"), Commands.leave),
    **dict.fromkeys((".", "source"), Commands.source),
    "eval": Commands.eval,
    "echo": Commands.echo,
    "printf": Commands.printf,
    "shift": Commands.shift,
    "set": Commands.set,
    "unset": Commands.unset,
    "let": Commands.let,
    **dict.fromkeys(("read", "mapfile", "readarray"), Commands.read),
    **dict.fromkeys(("cd", "pushd"), Commands.change_folder),
    **dict.fromkeys(("pwd", "dirname", "basename", "realpath", "readlink"), Commands.path),
    **dict.fromkeys((":", "true", "false", "trap", "shopt", "ulimit", "umask", "alias", "popd", "mkdir", "sleep"),
                    Commands.succeed),
}  # fmt: skip
"""Name -> what it does to the shell."""
