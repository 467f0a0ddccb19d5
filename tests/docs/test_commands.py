"""Every command and every program of README.md and docs/*.md, in the order of its page.

Trainings whose run folder is not used later on their page end with the resolved settings; other tests train.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from megajax import plan
from megajax.command_line.parser import parse
from megajax.planning.resolve import resolve
from megajax.train import COMMON, FLAGS
from tests.docs.blocks import PAGES, ROOT, Block, blocks, commands, without_runner
from tests.docs.prepared import PRELUDES, prepare

SHORTER = {
    "megajax.train": ("--steps=3", "--evaluation.batches=1"),
    "megajax.plan": ("--formula",),
    "mfu": ("--steps=2",),
}
"""Settings that make a command take seconds. The page's own settings win."""
REPLACED = {
    "--schedule.anneal_steps=200": "--schedule.anneal_steps=1",
    **dict.fromkeys(("--steps=60", "--steps=100", "--steps=150", "--steps=600"), "--steps=3"),
}
"""Settings that do not suit so few steps, or that ask for more."""
FOLLOWED = (
    *("README.md", "benchmarks.md", "checkpoints.md", "config.md", "evaluation.md", "generate.md"),
    *("getting_started.md", "inference.md", "preprocess.md", "tuning.md"),
)
"""Pages that are run in one folder, as users follow them."""
COMPLETE = ("--help", "--print-config", "--schedule")
"""Flags of commands that take seconds as they are."""

LEFT_OUT = {
    "pip install": "installs packages",
    "uv sync": "installs packages",
    "pytest": "would run this test",
    ".ci/": "would run this test",
    "--audit": "compiles for minutes; tests/planning/test_plan_for_devices.py audits a small program",
    "sbatch": "needs Slurm",
    "s3://": "needs an object store; tests/checkpoint/test_store_commands.py gives the commands to servers",
    "gpu_check.sh": "takes half an hour; tests/benchmarks/test_gpu_check.py runs its parts",
    "--config=bench.py": "needs a GPU",
    "--config=llama3.py --precision.matmul=": "needs GPUs; tests/job trains in each recipe",
    "--config=own.py\n": "takes hours on a CPU; the page tries own.py:debug",
    "FILE.xplane": "needs a profile; tests/metrics reads one",
    "source .venv": "the tests run in that environment",
    "-m benchmarks kernels": "needs a GPU",
    "--hf=models/Qwen3-VL": "needs a Hugging Face folder; tests/interop reads one",
    "--hf=llama_folder": "needs a Hugging Face folder; tests/tasks evaluates one",
    "--config=sft.py:": "needs a Hugging Face folder; tests/job starts from one",
    "--config=dpo.py\n": "needs a Hugging Face folder; the page runs its debug twin",
    "--config=grpo.py": "takes minutes, or needs a Hugging Face folder; tests/tuning trains the debug twin",
    "--config=glue.py:glue_mrpc": "needs GLUE; the page runs its debug twin",
    "--run=runs/glue_mrpc": "needs GLUE",
    "--config=race.py ": "needs RACE; tests/tasks runs its debug twin",
    "--config=squad.py:squad_v1 ": "needs SQuAD; tests/tasks runs its debug twin",
    "--config=runs/gpt/config.yaml": "needs token files; tests/interop goes on with such a run",
    "-m benchmarks program_audit": "tests/planning/test_program_audit_deviceless.py does the same",
    "--chat": "waits for a person; tests/inference has conversations",
    "megajax.serve": "runs until a signal stops it; tests/server runs it",
    "hf download": "needs the network",
    "curl ": "needs a server; tests/server asks one",
    "-m benchmarks record": "trains for minutes; tests/benchmarks/test_quickstart_record.py has a short run",
    "-m benchmarks serving_load": "needs a server; tests/server starts one",
}
"""Words of the commands that do not run here, with the reason."""

RUN = ("bash", "console", "python", "yaml")
PAGES_WITH_BLOCKS = [page for page in PAGES if any(block.language in RUN for block in blocks(page))]


def reason_to_leave_out(arguments: list[str]) -> str | None:
    line = " ".join(arguments) + "\n"
    return next((reason for part, reason in LEFT_OUT.items() if part in line), None)


def shorten(arguments: list[str]) -> list[str]:
    """The command, with fewer steps if it trains for a default number of steps, and without compiled plans."""
    names = {word.split("=")[0] for word in arguments}
    if names & {*COMPLETE}:
        return arguments
    added = next((extra for name, extra in SHORTER.items() if name in arguments), ())
    arguments = [REPLACED.get(word, word) for word in arguments]
    return [*arguments, *(extra for extra in added if extra.split("=")[0] not in names)]


def run(arguments: list[str], folder: Path) -> None:
    """Runs a command in `folder`, the current one, as a user would, and prints its output, shortened.

    Plans by formula, of which the pages have dozens, run in this process.
    """
    if arguments[:3] == ["python", "-m", "megajax.plan"] and "--formula" in arguments:
        assert plan.main(arguments[3:]) == 0
        return
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    result = subprocess.run(
        arguments, cwd=folder, env=os.environ | {"PATH": path}, capture_output=True, text=True, timeout=900, check=False
    )
    lines = (result.stdout + result.stderr).splitlines()
    excerpt = lines if len(lines) <= 12 else [*lines[:6], "    ...", *lines[-6:]]
    print(f"$ {' '.join(arguments)}", *excerpt, sep="\n")
    assert result.returncode == 0, f"{' '.join(arguments)} ended with {result.returncode}:\n" + "\n".join(lines[-40:])


def check_training(words: list[str], later: str) -> bool:
    """Resolves the settings of a training on its devices. Returns whether a later block of the page uses its run."""
    launcher = [word.partition("=")[2] for word in words if word.startswith("--processes=")]
    words = words[words.index("megajax.train") + 1 :]
    devices = [word.partition(":")[2] for word in words if word.startswith("--devices=")]
    # A process that has imported jax takes no --devices.
    words = [word for word in words if not word.startswith("--devices=")]
    command = parse(words, verb="train", flags=FLAGS, common=COMMON)
    resolve(command.config, jax.devices()[: int([*launcher, *devices, ""][0] or 1)])
    return command.config.run_dir in later


def file_of(block: Block) -> str | None:
    """The file that a block shows: its first line is `# FILE`."""
    first, _, _ = block.text.partition("\n")
    return first.removeprefix("# ") if first.startswith("# ") and first.endswith((".py", ".yaml")) else None


def commands_of(block: Block) -> list[list[str]]:
    return [*map(without_runner, commands(block))] if block.language in ("bash", "console") else []


def with_configs(folder: Path) -> Path:
    """The folder, with what a checkout has."""
    shutil.copytree(ROOT / "configs", folder / "configs")
    (folder / "benchmarks").symlink_to(ROOT / "benchmarks")
    return folder


@pytest.fixture(scope="module")
def common(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, set[tuple[str, ...]]]:
    """The folder of FOLLOWED, and the commands that ended there: several pages begin with the quickstart."""
    return with_configs(tmp_path_factory.mktemp("pages")), set()


def steps_of(page: Path, folder: Path) -> Iterator[list[str]]:
    """Writes the files of a page, and yields its commands, and then all of its Python as one program."""
    name, program = page.relative_to(ROOT).as_posix(), ""
    for number, block in enumerate(blocks(page)):
        if (file := file_of(block)) and (ROOT / file).is_file():
            excerpt = block.text.partition("\n")[2]
            assert all(line in (ROOT / file).read_text().splitlines() for line in excerpt.splitlines()), str(block)
        elif file:
            (folder / file).write_text(block.text, encoding="utf-8")
        elif block.language == "python":
            program += PRELUDES.get(name, "") + block.text
        here = [shorten(words) for words in commands_of(block) if not reason_to_leave_out(words)]
        later = [*map(" ".join, here), *(after.text for after in blocks(page)[number + 1 :])]
        for index, words in enumerate(here, 1):
            finished = {"--help", "--print-config"} & {word.partition("=")[0] for word in words}
            if "megajax.train" not in words or finished or check_training(words, "\n".join(later[index:])):
                yield words
    if program:
        yield [sys.executable, "-c", program]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES_WITH_BLOCKS, ids=lambda page: page.name)
def test_all_blocks_of_a_page_run(
    page: Path, common: tuple[Path, set[tuple[str, ...]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, ended = common if page.name in FOLLOWED else (with_configs(tmp_path), set())
    monkeypatch.chdir(folder)
    prepare(page.relative_to(ROOT).as_posix(), folder)
    for arguments in steps_of(page, folder):
        if tuple(arguments) not in ended:
            run(arguments, folder)
            ended.add(tuple(arguments))


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
