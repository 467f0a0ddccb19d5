"""All processes of a run must see the same files: processes as threads, each with its own folder."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from peer_threads import ThreadPeers, together
from small_jobs import run_config

from megajax.checkpoint.config import CheckpointConfig, WeightsConfig
from megajax.config.dump import flatten
from megajax.config.errors import UserError
from megajax.data.checksum import group_files
from megajax.job.start.equal_inputs import demand_equal_files, input_groups
from megajax.tokenizers.config import GPT2TokenizerConfig, HuggingFaceTokenizerConfig

PROCESSES = 4


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """One folder for each process, with the same files."""
    folders = [tmp_path / f"machine{index}" for index in range(PROCESSES)]
    for folder in folders:
        folder.mkdir()
        (folder / "text.bin").write_bytes(bytes(range(256)) * 400)
        (folder / "text.idx").write_bytes(b"index")
    return folders


def outcomes(folders: list[Path], names: tuple[str, ...] = ("text.bin", "text.idx")) -> list[str]:
    """The error of each process; "" without one."""

    def work(peers: ThreadPeers) -> str:
        try:
            demand_equal_files(peers, group_files([str(folders[peers.index] / name) for name in names]))
        except UserError as error:
            return str(error)
        return ""

    return together(PROCESSES, work)


def test_equal_files_in_other_places(folders):
    assert outcomes(folders) == [""] * PROCESSES


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "other bytes": (
        lambda folder: (folder / "text.bin").write_bytes(bytes(range(255, -1, -1)) * 400),
        "text.bin: in place of {first}/text.bin, checksum of a sample of its content: ",
    ),
    "another size": (lambda folder: (folder / "text.idx").write_bytes(b"indices"), "bytes: 5 -> 7"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_processes_with_other_files_are_named(folders, case):
    change, text = CHANGES[case]
    for process in (1, 3):
        change(folders[process])
    errors = outcomes(folders)
    assert len(set(errors)) == 1, errors
    assert errors[0].startswith("processes 1 and 3 read other files than process 0. From process 0 to process 1: ")
    assert text.format(first=folders[0]) in errors[0]
    assert errors[0].endswith("All processes need the same data, tokenizer and initial weights")


def test_a_file_that_one_process_lacks(folders):
    (folders[2] / "text.idx").unlink()
    errors = outcomes(folders)
    assert len(set(errors)) == 1 and errors[0].startswith("process 2: ") and "text.idx" in errors[0]


def test_files_of_the_tokenizer_and_of_initial_weights(tmp_path):
    (tmp_path / "weights").mkdir()
    for name in ("vocab.json", "merges.txt", "weights/tokenizer.json", "weights/model.safetensors"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "weights/subfolder").mkdir()
    tokenizer = GPT2TokenizerConfig(vocabulary=str(tmp_path / "vocab.json"), merges=str(tmp_path / "merges.txt"))
    load = CheckpointConfig(weights=(WeightsConfig(run=Path(f"hf:{tmp_path / 'weights'}")),))
    cfg = replace(run_config(tmp_path), tokenizer=tokenizer, checkpoint=load)
    groups = input_groups(flatten(cfg), cfg.checkpoint.sources())
    names = [[Path(file).name for file in group.files] for group in groups]
    assert names == [["vocab.json"], ["merges.txt"], ["model.safetensors", "tokenizer.json"]]
    # A resumed run does not read them.
    assert len(input_groups(flatten(cfg), ())) == 2
    folder = replace(cfg, tokenizer=HuggingFaceTokenizerConfig(path=str(tmp_path / "weights")))
    assert [len(group.files) for group in input_groups(flatten(folder), ())] == [2]
    missing = replace(cfg, tokenizer=HuggingFaceTokenizerConfig(path=str(tmp_path / "absent.json")))
    assert [group.files for group in input_groups(flatten(missing), ())] == [()]
