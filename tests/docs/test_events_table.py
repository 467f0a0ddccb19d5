"""docs/logging.md lists every event that the code writes."""

import ast
import re
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
WRITERS = {"event", "_event", "_record_event", "_append", "append_event"}


def recorded_events() -> set[str]:
    """First arguments of calls that write events, in code that belongs to training runs."""
    names = set()
    for folder in ("job", "faults", "launcher", "metrics", "checkpoint"):
        for path in (REPOSITORY / "megajax" / folder).rglob("*.py"):
            for call in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)):
                method = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
                texts = [part.value for part in call.args[:2] if isinstance(part, ast.Constant)]
                names |= {text for text in texts if method in WRITERS and isinstance(text, str)}
    return names


def test_every_event_is_in_the_table() -> None:
    text = (REPOSITORY / "docs/logging.md").read_text()
    rows = re.findall(r"^\| (`.*?) \|", text[text.index("## Events") :], re.MULTILINE)
    listed = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert {"start", "crash", "save_failed", "restart", "goodput"} <= recorded_events()
    assert recorded_events() - listed == set()
