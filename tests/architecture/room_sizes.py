"""Lines and files of Python of each room of the library, of tests and benchmarks, and of Markdown of docs.

python tests/architecture/room_sizes.py              # of the working tree, beside their budgets
python tests/architecture/room_sizes.py --since REV  # what went in and out since a commit
python tests/architecture/room_sizes.py --lower      # lower the budgets to the sizes
"""

import argparse
import subprocess
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parents[2]
TABLE = Path(__file__).with_name("room_budgets.txt")
ENDINGS = {"megajax": ".py", "tests": ".py", "benchmarks": ".py", "docs": ".md"}
"""Top folder -> the files in it that are counted."""


class Size(NamedTuple):
    """Of a room."""

    lines: int = 0
    files: int = 0

    def fits(self, budget: "Size") -> bool:
        """Whether neither number is above its budget."""
        return self.lines <= budget.lines and self.files <= budget.files


def room_of(path: str) -> str | None:
    """The room of a file: a folder in megajax/, the commands beside them, or another top folder; None: not counted."""
    top, *below = path.split("/")
    if not below or not path.endswith(ENDINGS.get(top, "\0")):
        return None
    if top != "megajax":
        return f"{top}/"
    return below[0] if len(below) > 1 else "commands"


def sizes(paths: Iterable[str], read: Callable[[str], bytes]) -> dict[str, Size]:
    """Room -> its size, with a total of megajax/. read: the content of a path."""
    rooms: dict[str, Size] = {}
    for path in paths:
        if (room := room_of(path)) is not None:
            size, lines = rooms.get(room, Size()), read(path).count(b"\n")
            rooms[room] = Size(size.lines + lines, size.files + 1)
    inside = [size for room, size in rooms.items() if not room.endswith("/")]
    return {**dict(sorted(rooms.items())), "megajax/": Size(*map(sum, zip(*inside, strict=True)))}


def of_the_tree() -> dict[str, Size]:
    """Sizes in the working tree."""
    found = (path for top in ENDINGS for path in sorted((REPOSITORY / top).rglob(f"*{ENDINGS[top]}")))
    return sizes((path.relative_to(REPOSITORY).as_posix() for path in found), lambda p: (REPOSITORY / p).read_bytes())


def of_commit(revision: str) -> dict[str, Size]:
    """Sizes at a commit."""
    names = git("ls-tree", "-r", "--name-only", revision).decode().splitlines()
    counted = [name for name in names if room_of(name) is not None]
    request = "".join(f"{revision}:{name}\n" for name in counted).encode()
    blobs, contents = git("cat-file", "--batch", text=request), {}
    for name in counted:
        header, _, rest = blobs.partition(b"\n")
        size = int(header.split()[-1])
        contents[name], blobs = rest[:size], rest[size + 1 :]
    return sizes(counted, contents.__getitem__)


def budgets(text: str) -> dict[str, Size]:
    """The table: a line `room lines files` for each room; # begins a comment."""
    rows = [line.partition("#")[0].split() for line in text.splitlines()]
    return {room: Size(int(lines), int(files)) for room, lines, files in filter(None, rows)}


def written(table: Mapping[str, Size], raised: str = "") -> str:
    """The text of a table of budgets. raised: the comment lines at its end, one for each rise."""
    head = "# Budgets of the rooms: lines and files, as tests/architecture/room_sizes.py counts them. They only fall.\n"
    return head + "".join(f"{room:<14}{size.lines:>7}{size.files:>5}\n" for room, size in table.items()) + raised


def comments(text: str) -> str:
    """The comment lines below a table."""
    return "".join(line for line in text.splitlines(keepends=True)[1:] if line.startswith("#"))


def git(*words: str, text: bytes = b"") -> bytes:
    """The output of a git command in this repository. Raises OSError or CalledProcessError without one."""
    return subprocess.run(["git", *words], cwd=REPOSITORY, input=text, capture_output=True, check=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--since", metavar="REV")
    parser.add_argument("--lower", action="store_true")
    options, now = parser.parse_args(), of_the_tree()
    text = TABLE.read_text(encoding="utf-8") if TABLE.exists() else ""
    limits = budgets(text) or dict(now)
    if options.lower:
        kept = {room: Size(*map(min, zip(limits.get(room, size), size, strict=True))) for room, size in now.items()}
        TABLE.write_text(written(kept, comments(text)), encoding="utf-8")
    try:
        before = of_commit(options.since) if options.since else limits
    except subprocess.CalledProcessError:
        parser.error(f"--since {options.since}: git knows no such commit")
    print(f"{'room':<14}{options.since or 'budget':>13}{'now':>13}{'difference':>15}")
    for room in sorted({*before, *now}, key=lambda room: (room.endswith("/"), room)):
        old, new = before.get(room, Size()), now.get(room, Size())
        lines, files = new.lines - old.lines, new.files - old.files
        print(f"{room:<14}{old.lines:>8}{old.files:>5}{new.lines:>8}{new.files:>5}{lines:>+10}{files:>+5}")


if __name__ == "__main__":
    main()
