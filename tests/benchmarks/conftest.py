"""The programs of benchmarks/ can be imported here by their names."""

import sys
from pathlib import Path

# At the end: none of their names may hide a library's.
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
