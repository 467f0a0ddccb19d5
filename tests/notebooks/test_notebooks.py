"""The notebooks are stored clean, and every cell runs in a kernel of its own as a reader starts it."""

import json
import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[2] / "notebooks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
LIMIT_SECONDS = 1700
"""Of a cell: on a busy machine training takes many times what it takes on an idle one."""


def read(name: str) -> nbformat.NotebookNode:
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def executed(name: str, folder: Path, steps: int | None = None) -> list[str]:
    """The text that each code cell shows, by its order. steps: instead of the notebook's own."""
    book = read(name)
    for cell in book.cells:
        if steps is not None and "parameters" in cell.metadata.get("tags", []):
            cell.source = f"steps = {steps}"
    # Neither another installation's kernels and settings, nor what this process was told of devices.
    os.environ |= {f"JUPYTER_{kind}_DIR": str(folder / "jupyter") for kind in ("DATA", "CONFIG", "RUNTIME")}
    os.environ["IPYTHONDIR"] = str(folder / "ipython")
    told = ("JAX_", "XLA_", "MPLBACKEND")
    env = {name: value for name, value in os.environ.items() if not name.startswith(told)} | {"JAX_PLATFORMS": "cpu"}
    client = NotebookClient(book, timeout=LIMIT_SECONDS, resources={"metadata": {"path": str(folder)}})
    client.execute(env=env)
    return [
        "".join(str(out.get("text", "") or out.get("data", {}).get("text/plain", "")) for out in cell.outputs)
        for cell in book.cells
        if cell.cell_type == "code"
    ]


@pytest.mark.parametrize("name", NAMES)
def test_notebooks_are_stored_clean(name):
    """Valid nbformat 4.5 with the layout of Jupyter's own JSON, no outputs, no counts, nothing of a machine."""
    text = (FOLDER / f"{name}.ipynb").read_text(encoding="utf-8")
    stored = json.loads(text)
    assert text == json.dumps(stored, indent=1, ensure_ascii=False) + "\n"
    nbformat.validate(stored)
    assert (stored["nbformat"], stored["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in stored["cells"]}) == len(stored["cells"])
    for cell in stored["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None, cell["id"]
        assert set(cell["metadata"]) <= {"tags"}, cell["id"]
    assert set(stored["metadata"]) == {"kernelspec", "language_info"}
    assert sum("parameters" in cell["metadata"].get("tags", []) for cell in stored["cells"]) == 1


@pytest.mark.slow
def test_own_text_runs(tmp_path):
    shown = executed("own_text", tmp_path, steps=2)
    (run,) = [text for text in shown if text.startswith("<Run")]
    assert "layout  1 cpu device;" in run
    assert "step    2: loss " in "".join(shown)
    assert "Figure" in "".join(shown)
    assert any(text.startswith("The statement ") for text in shown)
    assert (tmp_path / "runs/own_text/tokens.bin").exists()


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_SECONDS)
def test_own_text_learns(tmp_path):
    """With its own number of steps: better than the frequencies of single bytes allow, 3.26, by far."""
    lines = [line for text in executed("own_text", tmp_path) for line in text.splitlines()]
    losses = [float(line.rpartition(" ")[2]) for line in lines if line.startswith("step ")]
    assert len(losses) == 6
    assert losses[-1] < 1.8


@pytest.mark.slow
def test_first_mesh_runs(tmp_path):
    shown = executed("first_mesh", tmp_path)
    text = "\n".join(shown)
    assert "layout  8 cpu devices: data 4, tensor 2; zero1" in text
    assert "fsdp        (2, 16, 64)     (2, 16, 64)     (2, 16, 64)     (2, 64, 64)" in text
    assert "largest difference: " in text, "the notebook itself compares the losses"
    assert shown[-1].startswith("12 weights on 8 devices (pipeline 2, data 2, tensor 2), fsdp\n")
