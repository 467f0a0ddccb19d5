"""Data that changes between two attempts of a run is detected; the same data at another place is no change."""

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gangs import CONFIG, TRAIN, Started, started
from peer_threads import ThreadPeers, together
from user_errors import user_error

from megajax.checkpoint.config import CheckpointConfig
from megajax.data.rows.config import CyclicConfig
from megajax.data.rows.cyclic import CyclicRows
from megajax.data.rows.row_source import index_files_of
from megajax.data.rows.splits import Rows, Splits
from megajax.data.text.config import BlendConfig
from megajax.data.text.indexed_dataset import IndexedWriter
from megajax.job.start import equal_inputs
from megajax.job.start import resume as resuming
from megajax.job.start.equal_inputs import DataFiles
from megajax.job.start.resume import Resume
from megajax.models.decoder.config import text_schema
from megajax.optim.config import ScheduleConfig


class Source:
    """Rows of files."""

    def __init__(self, *paths: Path):
        self.paths = paths

    def files(self) -> tuple[Path, ...]:
        return self.paths


class Attempts:
    """A run that stops and resumes, of which only its data and the facts about it are real."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.said: list[str] = []
        self.meta: dict[str, Any] = {}
        self.checkpoint = CheckpointConfig()
        monkeypatch.setattr(resuming, "facts", lambda parts: parts.facts)

    def __call__(self, *paths: Path, verify: bool = False, valid: Source | None = None, **facts: Any) -> None:
        """An attempt that reads these files, and leaves a checkpoint."""
        data = DataFiles(verify=verify, say=self.said.append)
        cfg = SimpleNamespace(checkpoint=self.checkpoint, schedule=ScheduleConfig(), run_dir="RUN")
        parts: Any = SimpleNamespace(splits=Splits(Source(*paths), valid, None), facts=facts, cfg=cfg)
        reader: Any = SimpleNamespace(meta=lambda step: self.meta)
        if self.meta:
            Resume(reader, 7, same_run=True, say=self.said.append, data=data)._compare(parts)
        data.read_sums(parts.splits)
        self.meta = json.loads(json.dumps({"facts": facts, "data_files": data.plain()}))


@pytest.fixture
def attempt(monkeypatch: pytest.MonkeyPatch) -> Attempts:
    return Attempts(monkeypatch)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "text.bin"
    path.write_bytes(bytes(range(200)))
    return path


def test_other_content_of_the_same_size_is_refused(attempt: Attempts, file: Path) -> None:
    attempt(file)
    attempt(file)
    before = attempt.meta
    file.write_bytes(bytes(range(1, 201)))
    with user_error() as error:
        attempt(file)
    text = str(error.value)
    assert f"data: {file}: checksum of a sample of its content: " in text and "-> " in text
    assert "checkpoint.changed_data=accept" in text and error.value.code == 2 and not attempt.said
    assert attempt.meta == before


def test_a_change_is_accepted_on_request(attempt: Attempts, file: Path) -> None:
    attempt(file, **{"data: order": "a", "data.seed": 1})
    file.write_bytes(b"other")
    attempt.checkpoint = CheckpointConfig(changed_data="accept")
    attempt(file, **{"data: order": "b", "data.seed": 2})
    assert len(attempt.said) == 1 and "changed data from step 7 on" in attempt.said[0]
    for text in ("data: order: a -> b", "data.seed: 1 -> 2", f"data: {file}: bytes: 200 -> 5"):
        assert text in attempt.said[0]
    attempt.checkpoint = CheckpointConfig()
    attempt(file, **{"data: order": "b", "data.seed": 2})  # From now on, the accepted files are the reference.
    attempt.checkpoint = CheckpointConfig(changed_data="accept")
    with user_error():  # only data may change
        attempt.meta["facts"]["seed"] = 1
        attempt(file, **{"data: order": "b", "data.seed": 2, "seed": 2})


def test_files_that_moved_are_accepted(attempt: Attempts, file: Path) -> None:
    attempt(file, **{"data.paths": '["0.3", text, "0.7", b]'})
    moved = file.rename(file.with_name("moved.bin"))
    attempt(moved, **{"data.paths": '["0.3", moved, "0.7", b]'})
    assert attempt.said == ['data.paths: ["0.3", text, "0.7", b] -> ["0.3", moved, "0.7", b]; the content is the same']
    with user_error():  # other weights
        attempt(moved, **{"data.paths": '["0.4", moved, "0.6", b]'})
    moved.write_bytes(b"other")
    with user_error():
        attempt(moved, **{"data.paths": "[again]"})


def test_files_that_are_no_longer_read_are_not_accepted_unseen(attempt: Attempts, file: Path) -> None:
    attempt(file, valid=Source(file), **{"data.valid_paths": "[a]"})
    with user_error():
        attempt(file, **{"data.valid_paths": "[b]"})
    attempt(file, valid=Source(file), **{"data.valid_paths": "[b]"})


def test_another_number_of_files_is_refused(attempt: Attempts, file: Path) -> None:
    attempt(file)
    (more := file.with_name("more")).touch()
    with user_error():
        attempt(file, more)


def test_a_checkpoint_without_checksums_is_resumed(attempt: Attempts, file: Path) -> None:
    attempt.meta = {"facts": {}}
    attempt(file)
    assert attempt.meta["data_files"]["train"][0]["bytes"] == 200


def test_verifying_detects_changes_between_the_blocks_of_a_sample(attempt: Attempts, tmp_path: Path) -> None:
    large = tmp_path / "large"
    large.touch()
    os.truncate(large, 100 << 20)
    attempt(large, verify=True)
    assert len(attempt.said) == 1 and "every byte of 1 files" in attempt.said.pop()
    attempt(large)  # Only the sample; the checksum of the whole file is kept.
    with large.open("r+b") as opened:
        opened.seek(50 << 20)
        opened.write(b"?")
    attempt(large)
    with user_error():
        attempt(large, verify=True)


def test_verifying_reads_the_cached_index_too(attempt: Attempts, file: Path, tmp_path: Path) -> None:
    prefix = write(tmp_path / "text", 0)
    config = BlendConfig(paths=(str(prefix),), split="1", cache_dir=str(tmp_path / "cache"))
    text = SimpleNamespace(vocabulary_size=1000, eod=0, pad=None, identity="test")
    rows = config.build(tokenizer=text, schema=text_schema(8, 1000), rows=Rows(None), seed=1).train
    (index,) = index_files_of(CyclicRows(CyclicConfig(), source=rows, rows=4, shards=1, micro_rows=2))
    attempt(file, valid=rows, verify=True)
    content = bytearray(index.read_bytes())
    content[64] ^= 1
    index.write_bytes(content)
    attempt(file, valid=rows)
    with user_error():
        attempt(file, valid=rows, verify=True)


def test_the_processes_of_a_host_divide_the_cached_indices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three processes on two hosts: each host reads all files, because its disk may have its own."""
    names, checked = [Path(f"{number}") for number in range(5)], [list[Path]() for _ in range(3)]
    hosts = ("a", "b", "a")

    def verify_share(peers: ThreadPeers) -> None:
        threading.current_thread().name = str(peers.index)
        DataFiles(verify=True)._verify_indices(peers, [*names, names[0]])

    monkeypatch.setattr(equal_inputs, "machine_name", lambda: hosts[int(threading.current_thread().name)])
    monkeypatch.setattr(equal_inputs, "verify", lambda file: checked[int(threading.current_thread().name)].append(file))
    together(3, verify_share)
    assert checked == [names[::2], names, names[1::2]]


def test_verifying_for_the_first_time_is_reported(attempt: Attempts, file: Path) -> None:
    attempt(file)
    attempt(file, verify=True)
    assert len(attempt.said) == 2 and "the last checkpoint has no checksums of whole files" in attempt.said[1]
    attempt(file, verify=True)
    assert len(attempt.said) == 3


def write(prefix: Path, first: int) -> Path:
    with IndexedWriter(prefix, np.dtype(np.uint16)) as writer:
        for document in range(first, first + 200):
            writer.add_document([np.arange(document, document + 100, dtype=np.uint16) % 60])
    return prefix


@pytest.fixture
def run(tmp_path: Path) -> Any:
    with started(tmp_path) as start:

        def train(*settings: str, **more: str) -> Started:
            cache = f"--data.cache_dir={tmp_path / 'cache'}"
            data = ("--data.type=BlendConfig", f"--data.paths={tmp_path / 'text'}", "--data.split=1", cache)
            single = ("--batch.micro_size=4", "--evaluation.every=none", "--evaluation.at_end=false")
            base = (f"--config={CONFIG}", "--devices=cpu:1", f"--run_dir={tmp_path / 'run'}", *data, *single)
            return start(*TRAIN, *base, *settings, name=f"output{len(list(tmp_path.iterdir()))}", **more)

        yield train


@pytest.mark.slow
def test_a_file_truncated_during_a_run_ends_it_with_one_message(run: Callable[..., Started], tmp_path: Path) -> None:
    """Through a memory map, the process would end with SIGBUS."""
    write(tmp_path / "text", 0)
    training = run("--steps=100000", "--checkpoint.every=none")
    training.until(lambda: "iteration" in training.text or "step" in training.text)
    os.truncate(tmp_path / "text.bin", 1000)
    assert training.wait() == 2, training.text
    assert "Traceback" not in training.text and "Bus error" not in training.text
    assert f"{tmp_path / 'text'}.bin: 40,000 bytes when the run opened it, 1,000 now" in training.text
    assert "row " in training.text
