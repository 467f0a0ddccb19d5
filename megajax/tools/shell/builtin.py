"""Commands of a shell that change or print values, and programs on file names whose output is known."""

import posixpath
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from megajax.tools.shell.conditions import Truth
from megajax.tools.shell.state import State, array, is_known
from megajax.tools.shell.syntax import NAME
from megajax.tools.shell.tree import Simple
from megajax.tools.shell.words import Words


class Shell(Protocol):
    """What a builtin needs of its shell."""

    state: State
    output: list[str] | None
    """What the commands of $(…) have printed; None: not known, or not wanted."""

    def words(self, line: int) -> Words:
        """The expansion of words of a line."""
        ...


def _print(shell: Shell, text: str) -> None:
    if shell.output is not None:
        shell.output.append(f"{text}\n")


def echo(shell: Shell, fields: Sequence[str], node: Simple) -> Truth:
    """echo."""
    _print(shell, " ".join(field for field in fields if field not in ("-n", "-e", "-ne")))
    return True


def print_format(shell: Shell, fields: Sequence[str], node: Simple) -> Truth:
    """printf [-v NAME] format values."""
    name = fields[1] if fields[:1] == ["-v"] and len(fields) > 2 else ""
    form, *values = fields[2:] if name else [*fields, ""][: len(fields) or 1]
    text = re.sub(r"%[sd]", lambda _: values.pop(0) if values else "", form.replace("\\n", "\n"))
    if values or "%" in text.replace("%%", ""):
        text = shell.words(node.line).unknown("the output of printf is not known")
    if name:
        shell.state.assign(name, {"0": text})
    elif shell.output is not None:
        shell.output.append(text)
    return True


def shift(shell: Shell, fields: Sequence[str], node: Simple) -> Truth:
    """shift [count]."""
    count = int(fields[0]) if fields and fields[0].isdigit() else 1
    if count > len(shell.state.arguments):
        return False
    del shell.state.arguments[:count]
    return True


def set_options(shell: Shell, fields: Sequence[str], node: Simple) -> Truth:
    """set [options] [-- arguments]."""
    plain_fields = [field for field in fields if not field.startswith(("-", "+"))]
    if "--" in fields:
        shell.state.arguments = list(fields[fields.index("--") + 1 :])
    elif plain_fields and not any(field in ("-o", "+o") or re.fullmatch(r"[-+]\w*o", field) for field in fields):
        shell.state.arguments = plain_fields
    return True


def unset(shell: Shell, fields: Sequence[str], node: Simple) -> Truth:
    """unset names."""
    for field in fields:
        shell.state.variables.pop(field, None)
    return True


def let(shell: Shell, fields: Sequence[str], node: Simple) -> Truth:
    """let expressions."""
    numbers = [shell.words(node.line).number(field) for field in fields]
    return None if not numbers or numbers[-1] is None else numbers[-1] != 0


def read(shell: Shell, fields: Sequence[str], node: Simple) -> Truth:
    """read and mapfile: from <<< a known text, otherwise not known."""
    words = shell.words(node.line)
    names = [field for field in fields if re.fullmatch(NAME, field)]
    text = words.text(node.document.text) if node.document and not node.document.delimiter else None
    parts = text.split(None, len(names) - 1) if text is not None and names else []
    for number, name in enumerate(names):
        entry = words.unknown(f"${name} is read from outside") if text is None else "".join(parts[number : number + 1])
        shell.state.assign(name, array(text.split()) if text is not None and "-a" in fields else {"0": entry})
    return None if text is None else True


def options(shell: Shell, fields: Sequence[str], node: Simple) -> Truth:
    """getopts letters NAME."""
    letters, name, *_ = [*fields, "", ""]
    place = int((shell.state.value("OPTIND") or {"0": "1"})["0"])
    arguments = shell.state.arguments[place - 1 :]
    if not arguments or not re.fullmatch(r"-[^-]", arguments[0]):
        return False
    letter = arguments[0][1]
    takes_value = f"{letter}:" in letters
    shell.state.assign(name, {"0": letter if letter in letters else "?"})
    shell.state.assign("OPTARG", {"0": "".join(arguments[1:2]) if takes_value else ""})
    shell.state.assign("OPTIND", {"0": str(place + 1 + takes_value)})
    return True


def change_folder(shell: Shell, fields: Sequence[str], node: Simple) -> Truth:
    """cd, pushd."""
    target = fields[-1] if fields else ""
    shell.state.folder = shell.state.path(target) if is_known(target) else target
    return True


def folder(shell: Shell, fields: Sequence[str], node: Simple) -> Truth:
    """pwd."""
    _print(shell, shell.state.folder)
    return True


def path_part(part: Callable[[str], str]) -> Callable[[Shell, Sequence[str], Simple], Truth]:
    """A program that prints a part of a file name."""

    def print_part(shell: Shell, fields: Sequence[str], node: Simple) -> Truth:
        names = [field for field in fields if not field.startswith("-")]
        if names:
            path = part(names[0])
            _print(shell, path.removesuffix(names[1]) if len(names) > 1 else path)
        return True

    return print_part


def full_path(shell: Shell, fields: Sequence[str], node: Simple) -> Truth:
    """realpath, readlink -f. Links are not followed."""
    _print(shell, shell.state.path(fields[-1] if fields else ""))
    return True


def numbers(shell: Shell, fields: Sequence[str], node: Simple) -> Truth:
    """seq [first [step]] last."""
    are_numbers = all(re.fullmatch(r"-?\d{1,5}", field) for field in fields)
    if not 1 <= len(fields) <= 3 or not are_numbers or fields[1:-1] == ["0"]:
        shell.output = None
        return None
    first = int(fields[0]) if len(fields) > 1 else 1
    step = int(fields[1]) if len(fields) > 2 else 1
    last = int(fields[-1])
    for number in range(first, last + (1 if step > 0 else -1), step):
        _print(shell, str(number))
    return True


def nothing(shell: Shell, fields: Sequence[str], node: Simple) -> Truth:
    """A command without an effect on values."""
    return True


def failure(shell: Shell, fields: Sequence[str], node: Simple) -> Truth:
    """false."""
    return False


COMMANDS: Mapping[str, Callable[[Shell, Sequence[str], Simple], Truth]] = {
    "echo": echo,
    "printf": print_format,
    "shift": shift,
    "set": set_options,
    "unset": unset,
    "let": let,
    **dict.fromkeys(("read", "mapfile", "readarray"), read),
    "getopts": options,
    **dict.fromkeys(("cd", "pushd"), change_folder),
    "pwd": folder,
    "dirname": path_part(lambda path: posixpath.dirname(path.rstrip("/")) or "."),
    "basename": path_part(lambda path: posixpath.basename(path.rstrip("/"))),
    **dict.fromkeys(("realpath", "readlink"), full_path),
    "seq": numbers,
    **dict.fromkeys((":", "true", "trap", "shopt", "ulimit", "umask", "alias", "popd", "mkdir", "sleep"), nothing),
    "false": failure,
}
"""Name -> what it does to the shell."""
