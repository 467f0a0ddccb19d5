"""Write the table of Megatron-LM's flags into docs/megatron.md: `python -m megajax.tools.flag_table`."""

from itertools import groupby
from pathlib import Path

from megajax.command_line import front_door, parse
from megajax.config.errors import UserError
from megajax.tools.flags import Flag, Mapped, Refused
from megajax.tools.megatron_flags import PARTS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "megatron.md"
BEGIN, END = "<!-- flags: begin -->\n", "<!-- flags: end -->\n"


def markdown() -> str:
    """All flags, in parts: each with its default, and setting or reason. Neighbours with one answer share a row."""
    return "".join(f"\n## {title}\n\n| Flag | Here |\n|---|---|\n{_rows(rows)}" for title, rows in PARTS.items())


def _rows(rows: tuple[Flag, ...]) -> str:
    answers = ((answer, list(group)) for answer, group in groupby(rows, key=_here))
    return "".join(f"| {', '.join(map(_flag, group))} | {answer} |\n" for answer, group in answers)


def _flag(row: Flag) -> str:
    also = "".join(f" (`--{name}`)" for name in row.also)
    return f"`--{row.name}`{also}{_default(row)}"


def _default(row: Flag) -> str:
    match row.default:
        case None | False | []:
            return ""
        case float() as number:
            return f" [{number:g}]"
        case list() as words:
            return f" [{' '.join(words)}]"
    return f" [{row.default}]"


def _here(row: Flag) -> str:
    match row.fate:
        case Mapped(settings):
            return ", ".join(f"`{setting}`" for setting in settings)
        case Refused(reason):
            return f"refused: {reason}"
    return f"unnecessary: {row.fate.reason}"


def replaced(page: str) -> str:
    """The page with the table as it is now."""
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + markdown() + "\n" + END + rest.partition(END)[2]


def main(argv: list[str]) -> int:
    """Write the table into the page.

    Raises:
        UserError: for a wrong command line, or outside a checkout.
    """
    parse(argv, verb="tools.flag_table", with_config=False, description=(__doc__ or "").strip())
    if not PAGE.is_file():
        raise UserError(f"tools.flag_table writes {PAGE.name} of a checkout; there is no {PAGE}")
    PAGE.write_text(replaced(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote {PAGE}")
    return 0


if __name__ == "__main__":
    front_door(main)
