"""Put a quickstart run into README.md: its terminal output, shortened, its losses, and the top of its report.

    python -m megajax.train --config=quickstart.py | tee terminal.txt
    python -m docs.build.quickstart runs/quickstart terminal.txt

The picture is drawn in Chromium. README.md says how long the run took; say there on what.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
README, PICTURE = ROOT / "README.md", ROOT / "docs/pictures/quickstart_report.png"
BANNER = ("parameters", "shape", "first loss", "devices ", "mesh", "rows per step", "whole run", "precision")
FIELDS = ("learning rate: ", "lm loss: ", "grad norm: ")
STEPS = ("1", "10", "100", "600")
BLOCK = re.compile(r"```\n(MegaJAX\n.*?)\n```\n", re.DOTALL)


def excerpt(output: str) -> str:
    """The lines of a run's output that README.md shows. An excerpt is its own excerpt."""
    banner, sample = output[output.index("MegaJAX\n") :].partition("report: ")[::2]
    lines, section = ["MegaJAX"], ""
    for line in banner.splitlines():
        if re.match(r"  \w", line):
            section = line
        elif line.startswith("    ") and line.strip().startswith((*BANNER, "optimizer", "learning rate")):
            lines += [section] * bool(section) + [line]
            section = ""
        elif found := re.search(r" iteration +(\d+)/.*? \| ", line):
            fields = [field.strip() for field in line.split(" | ") if field.startswith(FIELDS)]
            lines += [f"{found[0]}... | {' | '.join(fields)} | ..."] * (found[1] in STEPS)
        elif re.match(rf"compiled the train step| (validation|test) loss at iteration {STEPS[-1]} ", line):
            lines.append(line)
    return "\n".join([*lines, f"report: {sample.partition('\n\ndone\n')[0].strip()}"])


def losses(block: str) -> str:
    """The losses that the report shows in its first lines, as text for those who do not see the picture."""
    found = [re.search(rf"{split} loss at iteration {STEPS[-1]} \| lm loss value: (\S+) ", block) for split in SPLITS]
    return ", ".join(f"{split} loss {float(one[1]):.4f}" for split, one in zip(SPLITS, found, strict=True) if one)


SPLITS = ("validation", "test")


def main(folder: Path, terminal: Path) -> None:
    sys.path.append(str(ROOT / "tests/server"))
    from browser import Browser

    block = excerpt(terminal.read_text(encoding="utf-8"))
    text = BLOCK.sub(lambda _: f"```\n{block}\n```\n", README.read_text(encoding="utf-8"))
    text = re.sub(r"!\[Report of this run: .*?, timeline", f"![Report of this run: {losses(block)}, timeline", text)
    taken = re.search(r"goodput +\S+ of (.+?) in \d", terminal.read_text(encoding="utf-8"))  # as in the picture
    text = re.sub(r"\([^(]+ in this run", f"({taken[1]} in this run", text) if taken else text
    README.write_text(text, encoding="utf-8")
    with Browser((folder / "report.html").resolve().as_uri(), window="1000,1010") as browser:
        browser.wait("document.readyState == 'complete' && document.querySelectorAll('svg').length > 1")
        browser.screenshot(PICTURE)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
