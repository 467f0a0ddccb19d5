"""Record the quickstart for README.md: its terminal as a picture, its losses and its time, the top of its report.

    python -m docs.build.quickstart

The report is drawn in Chromium. Run it on two idle cores with an empty compile cache, and say in README.md where.
"""

import codecs
import fcntl
import os
import pty
import re
import struct
import sys
import termios
import time
from pathlib import Path

from docs.build import pictures, terminal
from megajax.config import load

ROOT = Path(__file__).parents[2]
README, PICTURES = ROOT / "README.md", ROOT / "docs/pictures"
COMMAND = ("python", "-m", "megajax.train", "--config=quickstart.py")
SPLITS = ("validation", "test")


def watched(command: tuple[str, ...]) -> list[tuple[float, str]]:
    """What a command writes to a terminal, with the seconds since its start. Raises RuntimeError if it fails."""
    child, screen = pty.fork()
    if child == 0:
        os.execvp(command[0], command)
    fcntl.ioctl(screen, termios.TIOCSWINSZ, struct.pack("HHHH", terminal.ROWS, terminal.COLUMNS, 0, 0))
    begin, events, decoder = time.monotonic(), [], codecs.getincrementaldecoder("utf-8")("replace")
    while True:
        try:
            output = os.read(screen, 1 << 16)
        except OSError:  # the end of a terminal's output
            output = b""
        if not output:
            break
        events.append((round(time.monotonic() - begin, 2), decoder.decode(output)))
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        raise RuntimeError("".join(text for _, text in events)[-3000:])
    return events


def losses(run: terminal.Recording) -> str:
    """The losses that the report shows in its first lines, as text for those who do not see the picture."""
    lines = "\n".join(terminal.plain(line.text) for line in run.lines)
    found = [re.findall(rf"^{split} .*? loss (\S+)", lines, re.MULTILINE)[-1] for split in SPLITS]
    return ", ".join(f"{split} loss {float(value):.4f}" for split, value in zip(SPLITS, found, strict=True))


def main() -> None:
    sys.path.append(str(ROOT / "tests/server"))
    from browser import Browser

    os.environ.update(TERM="xterm-256color", PYTHONPATH=str(ROOT))
    run = terminal.recording(" ".join(COMMAND), watched(COMMAND))
    terminal.store(run)
    (PICTURES / "terminal.svg").write_text(pictures.DRAWN["terminal"](), encoding="utf-8")
    text = README.read_text(encoding="utf-8")
    text = re.sub(r"!\[Report of this run: .*?, timeline", f"![Report of this run: {losses(run)}, timeline", text)
    text = re.sub(r"\(\d+ s in this run", f"({run.lines[-1].seconds:.0f} s in this run", text)
    README.write_text(text, encoding="utf-8")
    report = Path(load("quickstart.py").run_dir, "report.html")
    with Browser(report.resolve().as_uri(), window="1000,1010") as browser:
        browser.wait("document.readyState == 'complete' && document.querySelectorAll('svg').length > 1")
        browser.screenshot(PICTURES / "quickstart_report.png")


if __name__ == "__main__":
    main()
