"""Every command and every program of README.md and docs/*.md runs, in the order of its page."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import PAGES, ROOT, Block, blocks, commands, without_runner
from tests.docs.prepared import PRELUDES, prepare

SHORTER = {
    "megajax.train": ("--steps=3", "--evaluation.batches=1"),
    "mfu": ("--steps=2",),
}
"""Settings that make a command take seconds. The page's own settings win."""
REPLACED = {"--schedule.anneal_steps=200": "--schedule.anneal_steps=1", "--steps=100": "--steps=3"}
"""Settings that do not suit so few steps, or that ask for more."""

LEFT_OUT = {
    "pip install": "installs packages",
    "uv sync": "installs packages",
    "pytest": "would run this test",
    ".ci/run": "would run this test",
    "jupyter": "opens a browser; tests/notebooks runs the notebooks",
    "sbatch": "needs Slurm",
    "gpu_check.sh": "takes half an hour; tests/benchmarks/test_gpu_check.py runs its parts",
    "--config=bench.py": "needs a GPU",
    "megajax.launch -- ": "needs a GPU; tests/launcher starts a process for each of a folder of device files",
    "--config=llama3.py --precision.fp8=Fp8 --": "needs a GPU",
    "--config=own.py\n": "takes hours on a CPU; the page tries own.py:debug",
    "FILE.xplane": "needs a profile; tests/metrics reads one",
    "source .venv": "the tests run in that environment",
    "-m benchmarks kernels": "needs a GPU",
    "wiki.valid.txt": "needs WikiText",
    "data/valid_text_sentence": "needs WikiText",
    "--hf=llama_folder": "needs a Hugging Face folder; tests/tasks evaluates one",
    "--config=sft.py:": "needs a Hugging Face folder; tests/job starts from one",
    "--config=glue.py:glue_mrpc": "needs GLUE; the page runs its debug twin",
    "--run=runs/glue_mrpc": "needs GLUE",
    "--config=race.py ": "needs RACE; tests/tasks runs its debug twin",
    "--config=squad.py:squad_v1 ": "needs SQuAD; tests/tasks runs its debug twin",
    "--config=runs/gpt/config.yaml": "needs token files; tests/interop goes on with such a run",
    "{rank: 16, alpha: 32}": "compiles for minutes",
    "-m benchmarks program_audit": "tests/planning/test_program_audit_deviceless.py does the same",
    "--chat": "waits for a person; tests/inference has conversations",
    "megajax.serve": "runs until a signal stops it; tests/inference/server runs it",
    "curl ": "needs a server; tests/inference/server asks one",
    "-m benchmarks serving_load": "needs a server; tests/inference/server starts one",
}
"""Words of the commands that do not run here, with the reason."""

RUN = ("bash", "console", "python", "yaml")
PAGES_WITH_BLOCKS = [page for page in PAGES if any(block.language in RUN for block in blocks(page))]


def reason_to_leave_out(arguments: list[str]) -> str | None:
    line = " ".join(arguments) + "\n"
    return next((reason for part, reason in LEFT_OUT.items() if part in line), None)


def shorten(arguments: list[str]) -> list[str]:
    """The command, with fewer steps if it trains for a default number of steps."""
    if any(word.startswith(("--help", "--print-config")) for word in arguments):
        return arguments
    added = next((extra for name, extra in SHORTER.items() if name in arguments), ())
    names = {word.split("=")[0] for word in arguments}
    arguments = [REPLACED.get(word, word) for word in arguments]
    return [*arguments, *(extra for extra in added if extra.split("=")[0] not in names)]


def run(arguments: list[str], folder: Path) -> None:
    """Runs a command in `folder` as a user would, and prints its output, shortened."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    result = subprocess.run(
        arguments, cwd=folder, env=os.environ | {"PATH": path}, capture_output=True, text=True, timeout=900, check=False
    )
    lines = (result.stdout + result.stderr).splitlines()
    excerpt = lines if len(lines) <= 12 else [*lines[:6], "    ...", *lines[-6:]]
    print(f"$ {' '.join(arguments)}", *excerpt, sep="\n")
    assert result.returncode == 0, f"{' '.join(arguments)} ended with {result.returncode}:\n" + "\n".join(lines[-40:])


def steps_of(block: Block, folder: Path) -> list[list[str]]:
    """The commands of a block. A block that starts with `# FILE` is written to that file; Python runs otherwise."""
    if block.language in ("bash", "console"):
        return [
            shorten(arguments)
            for arguments in map(without_runner, commands(block))
            if not reason_to_leave_out(arguments)
        ]
    first, _, _ = block.text.partition("\n")
    if first.startswith("# ") and first.endswith((".py", ".yaml")):
        (folder / first.removeprefix("# ")).write_text(block.text, encoding="utf-8")
        return []
    if block.language == "yaml":
        return []
    return [[sys.executable, "-c", PRELUDES.get(block.page, "") + block.text]]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES_WITH_BLOCKS, ids=lambda page: page.name)
def test_all_blocks_of_a_page_run(page: Path, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    prepare(page.relative_to(ROOT).as_posix(), tmp_path)
    for block in blocks(page):
        if block.language in RUN:
            for arguments in steps_of(block, tmp_path):
                run(arguments, tmp_path)


def test_every_command_is_in_a_block_that_is_run() -> None:
    """No test would run a command in a block without a language."""
    starts = ("python -m megajax", "uv run", "megajax ", "benchmarks/", "python -m benchmarks", "pip ", "pytest ")
    stray = [
        f"{block}: {line}"
        for page in PAGES
        for block in blocks(page)
        if block.language not in RUN
        for line in block.text.splitlines()
        if line.startswith(starts)
    ]
    assert not stray, "write ```bash above these:\n" + "\n".join(stray)


def test_commands_that_are_not_run_are_still_on_the_pages() -> None:
    every = [" ".join(arguments) + "\n" for page in PAGES for block in blocks(page) for arguments in commands_of(block)]
    assert [part for part in LEFT_OUT if not any(part in line for line in every)] == []


def commands_of(block: Block) -> list[list[str]]:
    return commands(block) if block.language in ("bash", "console") else []
