"""The notebooks are stored with small outputs of their own cells, and run in a kernel as a reader starts them.

`pytest -m slow tests/notebooks --update-golden` runs them and stores what they show.
"""

import base64
import hashlib
import json
import os
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[2] / "notebooks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
PICTURES = {"first_mesh": 0, "lora": 0, "own_text": 1}
"""Number of stored pictures."""
SHOWN = {
    "first_mesh": ("largest difference: ", "layers 0"),
    "lora": ("adapter_model.safetensors", "runs/adapted:", "81,920"),
    "own_text": ("step  300: loss ", "The statement "),
}
"""Texts of stored outputs."""
LIMIT_SECONDS = 1700
"""Limit of a cell: on a busy machine training takes many times what it takes on an idle one."""


def read(name: str) -> nbformat.NotebookNode:
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def code_hash(book: nbformat.NotebookNode) -> str:
    """A hash of the sources of all code cells: stored with outputs, it tells whether they are of these cells."""
    return hashlib.sha256(
        json.dumps([cell.source for cell in book.cells if cell.cell_type == "code"]).encode()
    ).hexdigest()


def store(name: str, book: nbformat.NotebookNode) -> None:
    """Write an executed notebook with its outputs, without warnings and times."""
    for cell in book.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [out for out in cell.outputs if out.get("name") != "stderr"]
    book.metadata = {key: book.metadata[key] for key in ("kernelspec", "language_info")}
    book.metadata["language_info"] = {"name": "python"}
    book.metadata["code_sha256"] = code_hash(book)
    stored = json.loads(nbformat.writes(book))
    (FOLDER / f"{name}.ipynb").write_text(json.dumps(stored, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def executed(name: str, folder: Path, *, update: bool) -> list[str]:
    """The text that each code cell shows, by its order. update: store them."""
    book = read(name)
    # Neither another installation's kernels and settings, nor what this process was told of devices.
    os.environ |= {f"JUPYTER_{kind}_DIR": str(folder / "jupyter") for kind in ("DATA", "CONFIG", "RUNTIME")}
    os.environ["IPYTHONDIR"] = str(folder / "ipython")
    told = ("JAX_", "XLA_", "MPLBACKEND")
    env = {name: value for name, value in os.environ.items() if not name.startswith(told)} | {"JAX_PLATFORMS": "cpu"}
    client = NotebookClient(
        book, timeout=LIMIT_SECONDS, record_timing=False, resources={"metadata": {"path": str(folder)}}
    )
    client.execute(env=env)
    if update:
        store(name, book)
    return [
        "".join(str(out.get("text", "") or out.get("data", {}).get("text/plain", "")) for out in cell.outputs)
        for cell in book.cells
        if cell.cell_type == "code"
    ]


@pytest.fixture
def update(request) -> bool:
    return request.config.getoption("--update-golden")


@pytest.mark.parametrize("name", NAMES)
def test_notebooks_are_stored_clean(name):
    """Valid nbformat 4.5 with the layout of Jupyter's own JSON, nothing of a machine."""
    text = (FOLDER / f"{name}.ipynb").read_text(encoding="utf-8")
    stored = json.loads(text)
    assert text == json.dumps(stored, indent=1, ensure_ascii=False) + "\n"
    nbformat.validate(stored)
    assert (stored["nbformat"], stored["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in stored["cells"]}) == len(stored["cells"])
    assert all(set(cell["metadata"]) <= {"tags"} for cell in stored["cells"])
    assert set(stored["metadata"]) == {"kernelspec", "language_info", "code_sha256"}
    assert sum("parameters" in cell["metadata"].get("tags", []) for cell in stored["cells"]) == 1
    assert not re.search(r"/(tmp|home|root|work|Users)/|0x[0-9a-f]{8}", text)


@pytest.mark.parametrize("name", NAMES)
def test_stored_outputs_are_of_these_cells_and_small(name):
    """All cells were executed in order and without errors, and their sources have not changed since."""
    book = read(name)
    advice = "run pytest -m slow tests/notebooks --update-golden"
    assert book.metadata["code_sha256"] == code_hash(book), f"the outputs are of other cells: {advice}"
    cells = [cell for cell in book.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == [*range(1, len(cells) + 1)]
    outputs = [out for cell in cells for out in cell.outputs]
    assert {out.output_type for out in outputs} <= {"stream", "display_data", "execute_result"}
    assert sum(bool(cell.outputs) for cell in cells) >= len(cells) // 2
    assert all(len(json.dumps(out)) < 100_000 for out in outputs), "an output is too large"
    images = [base64.b64decode(out.data["image/png"]) for out in outputs if "image/png" in out.get("data", {})]
    assert all(image.startswith(b"\x89PNG") for image in images)
    assert len(images) == PICTURES[name]
    shown = "".join(str(out.get("text", "") or out.get("data", {})) for out in outputs)
    assert all(text in shown for text in SHOWN[name])


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_SECONDS)
def test_own_text_learns(tmp_path, update):
    """After its own number of steps it is better by far than the frequencies of single bytes allow, 3.26."""
    shown = executed("own_text", tmp_path, update=update)
    lines = [line for text in shown for line in text.splitlines()]
    losses = [float(line.rpartition(" ")[2]) for line in lines if line.startswith("step ")]
    assert len(losses) == 6
    assert losses[-1] < 1.8
    (run,) = [text for text in shown if text.startswith("<Run")]
    assert "layout  1 cpu device;" in run
    assert "Figure" in "".join(shown)
    assert any(text.startswith("The statement ") for text in shown)
    assert (tmp_path / "runs/own_text/tokens.bin").exists()


@pytest.mark.slow
def test_first_mesh_runs(tmp_path, update):
    shown = executed("first_mesh", tmp_path, update=update)
    text = "\n".join(shown)
    assert "layout  8 cpu devices: data 4, tensor 2; zero1" in text
    assert "fsdp        (2, 16, 64)     (2, 16, 64)     (2, 16, 64)     (2, 64, 64)" in text
    assert "largest difference: " in text, "the notebook itself compares the losses"
    assert shown[-1].startswith("12 weights on 8 devices (pipeline 2, data 2, tensor 2), fsdp\n")


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_SECONDS)
def test_lora_learns_english(tmp_path, update):
    shown = executed("lora", tmp_path, update=update)
    base, adapted = (
        [float(loss) for loss in re.findall(r"validation loss at iteration \d+ \| lm loss value: (\S+) ", text)]
        for text in (shown[2], shown[4])
    )
    assert base[-1] < 3.0 and adapted[-1] < adapted[0]
    assert sorted(path.name for path in (tmp_path / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
