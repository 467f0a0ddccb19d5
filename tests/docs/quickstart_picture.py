"""Draws docs/pictures/quickstart_report.png: the top of a quickstart run's report, in Chromium.

    python -m megajax.train --config=quickstart.py
    python -m tests.docs.quickstart_picture runs/quickstart

README.md quotes the output of the same run: replace its lines as well.
"""

import sys
from pathlib import Path

from tests.docs.blocks import ROOT

sys.path.append(str(ROOT / "tests/inference/server"))
from browser import Browser

PICTURE = ROOT / "docs/pictures/quickstart_report.png"


def main(folder: Path) -> None:
    with Browser((folder / "report.html").resolve().as_uri(), window="1000,1010") as browser:
        browser.wait("document.readyState == 'complete' && document.querySelectorAll('svg').length > 1")
        browser.screenshot(PICTURE)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
