"""The commands of a text in which a shell has nothing to expand or to decide, such as a line of `bash -x`."""

import re
import shlex

from megajax.config.errors import UserError

PIECE = re.compile(
    r"""(?P<joined>\\\n) | (?P<cut>\\[ \t]+(?=\n)) | \$'(?P<escaped>(?:\\.|[^'\\])*)'
    | (?P<comment>(?<!\S)\#[^\n]*)
    | '[^']*' | "(?P<quoted>(?:\\.|[^"\\])*)" | \\.
    | (?P<expansion>\$(?:\w+|[({@*\#?!$"-])|`|<<|[<>]\()
    | (?P<redirection>(?:(?<!\S)\d+)?(?:&>>?|>[>|&]?|<[>&]?)[ \t]*[^\s;|&<>]+)
    | (?P<end>[\n;|&]+)
    | .""",
    re.VERBOSE | re.DOTALL,
)
EXPANSION = re.compile(r"(?<!\\)(?:\\\\)*(\$(?:\w+|[({@*#?!$-])|`)")
"""In double quotes."""
FOR_A_SHELL = "is for a shell. Give the expanded command, or have bash expand it: --run-script SCRIPT [ARGUMENTS]"
KEYWORDS = frozenset({
    "if", "then", "elif", "else", "fi", "for", "while", "until", "do", "done", "case", "esac", "select", "function",
    "{", "(", "[", "[[", "((",
})  # fmt: skip


def read_commands(text: str, path: str) -> list[tuple[str, ...]]:
    """The words of each command, without redirections. Raises UserError for a text that needs a shell."""
    commands, current, text = [], "", text.replace("\r\n", "\n")
    for piece in PIECE.finditer(text + "\n"):
        inner = EXPANSION.search(piece["quoted"] or "")
        if piece["expansion"] or inner:
            raise _fault(path, text, piece.start(), f"{inner[1] if inner else piece[0]} {FOR_A_SHELL}")
        if piece["cut"]:
            raise _fault(path, text, piece.start(), "blanks after \\ end the command: delete them")
        if (escaped := piece["escaped"]) is not None:
            current += shlex.quote(escaped.encode().decode("unicode_escape").encode("latin-1").decode())
        elif not piece["end"]:
            current += " " * bool(piece["redirection"]) or piece[0] * (not piece["joined"] and not piece["comment"])
        if not piece["end"]:
            continue
        try:
            words = shlex.split(current)
        except ValueError as error:
            raise _fault(path, text, piece.start(), str(error)) from error
        current = ""
        if words and set(words[0]) == {"+"}:
            words = words[1:]  # bash -x puts it before each command
        elif words and words[0] in KEYWORDS:
            raise _fault(path, text, piece.start(), f"{words[0]} {FOR_A_SHELL}")
        commands += [tuple(words)] if words else []
    return commands


def _fault(path: str, text: str, place: int, message: str) -> UserError:
    return UserError(f"{path}, line {text.count('\n', 0, place) + 1}: {message}")
