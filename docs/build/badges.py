"""The badges of README.md, one picture: tests, coverage, Python, licence, and what it runs on.

    python -m docs.build.badges coverage.json    # after: pytest --cov=megajax --cov-report=json:coverage.json
    python -m docs.build.pictures

The first command counts the tests and reads the coverage of the default suite into badges.json.
"""

import json
import re
import subprocess
import sys
import tomllib
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILE = Path(__file__).with_name("badges.json")
LEFT, GREEN, BLUE = "#57606a", "#1a7f37", "#0969da"


def badges() -> list[tuple[str, str, str]]:
    """What each says: a name, a value, its colour."""
    found = json.loads(FILE.read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    python = project["requires-python"].removeprefix(">=")
    return [
        ("tests", f"{found['tests']:,} + {found['slow']:,} slow", GREEN),
        ("coverage", f"{found['coverage']:.0f} %", GREEN),
        ("tested on", "CPU", BLUE),
        ("Python", f"{python}+", BLUE),
        ("license", project["license"], BLUE),
    ]


def draw() -> str:
    """All badges in a row, as SVG."""
    x, parts = 0.0, []
    for name, value, colour in badges():
        for text, fill in ((name, LEFT), (value, colour)):
            width = round(len(text) * 6.6 + 14)
            parts.append(f"<rect x='{x:g}' width='{width}' height='20' fill='{fill}'/>")
            parts.append(f"<text x='{x + width / 2:g}' y='14' textLength='{width - 14}'>{text}</text>")
            x += width
        x += 6
    title = ", ".join(f"{name}: {value}" for name, value, _ in badges())
    style = "text{font:11px Verdana,'DejaVu Sans',sans-serif;fill:#fff;text-anchor:middle}"
    head = f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {x - 6:g} 20' width='{x - 6:g}' role='img'>"
    return "\n".join([head, f"<title>{title}</title>", f"<style>{style}</style>", *parts, "</svg>", ""])


def main(coverage: Path) -> None:
    covered = json.loads(coverage.read_text(encoding="utf-8"))["totals"]["percent_covered"]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-o", "addopts=-m 'not slow and not aot'"]
    end = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()[-1]
    tests, every = map(int, re.findall(r"(\d+)/(\d+) tests", end)[0])
    found = {"tests": tests, "slow": every - tests, "coverage": round(covered, 1), "date": date.today().isoformat()}
    FILE.write_text(json.dumps(found) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
