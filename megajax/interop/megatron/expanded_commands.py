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
            raise _needs_shell(path, text, piece.start(), inner[1] if inner else piece[0])
        if piece["cut"]:
            raise UserError(f"{path}, line {_line(text, piece.start())}: blanks after \\ end the command: delete them")
        if piece["escaped"] is not None:
            current += shlex.quote(piece["escaped"].encode().decode("unicode_escape").encode("latin-1").decode())
        elif not piece["end"]:
            current += " " * bool(piece["redirection"]) or piece[0] * (not piece["joined"] and not piece["comment"])
        if not piece["end"]:
            continue
        try:
            words = shlex.split(current)
        except ValueError as error:
            raise UserError(f"{path}, line {_line(text, piece.start())}: {error}") from error
        current = ""
        if words and set(words[0]) == {"+"}:
            words = words[1:]  # bash -x puts it before each command
        elif words and words[0] in KEYWORDS:
            raise _needs_shell(path, text, piece.start(), words[0])
        commands += [tuple(words)] if words else []
    return commands


def _needs_shell(path: str, text: str, place: int, piece: str) -> UserError:
    return UserError(
        f"{path}, line {_line(text, place)}: {piece} is for a shell. Give the expanded command, or the script with "
        "--run-script SCRIPT [ARGUMENTS], and bash expands it"
    )


def _line(text: str, place: int) -> int:
    return text.count("\n", 0, place) + 1
