"""Local checkpoints are written and deleted only in folders of the run, whatever local.json says."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from local_sets import sets, small
from test_local_checkpoints import newest, opened, saved
from user_errors import user_error

from megajax.checkpoint import step_folders
from megajax.checkpoint.committed_steps import FolderSteps
from megajax.checkpoint.local.machine_folder import FILE, RunHistory, base_fault, folder_fault
from megajax.checkpoint.local.shard_set import FORMER, LocalSet
from megajax.checkpoint.manifest import Damaged, entry_of, read_manifest, write_manifest
from megajax.config.errors import UserError
from megajax.storage.atomic_folders import LOCK, SUFFIX, new_folder


def victim_in(folder: Path) -> Path:
    """A folder that must not be deleted."""
    (folder / "victim" / "process_0").mkdir(parents=True)
    (folder / "victim" / "process_0" / "thesis").write_text("years")
    return folder / "victim" / "process_0" / "thesis"


@pytest.mark.parametrize("run", ["{folder}/victim", "../victim", ".", "", "0123456789abcdeg", 5, None])
def test_a_name_that_leads_out_of_the_folder_is_refused_and_nothing_is_deleted(tmp_path: Path, run: Any) -> None:
    thesis = victim_in(tmp_path)
    (tmp_path / "shared").mkdir()
    name = run.format(folder=tmp_path) if isinstance(run, str) else run
    (tmp_path / "shared" / FILE).write_text(json.dumps({"run": name, "attempts": []}))
    # The message cuts a long name, and how long this one is depends on where the tests run.
    refused = pytest.raises(UserError, match="16 hexadecimal digits") if name != run else user_error()
    with refused:
        opened(tmp_path)
    assert thesis.read_text() == "years" and not (tmp_path / "node").exists()


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff", b'{"run": "0123456789abcdef"}'])
def test_a_damaged_history_neither_hides_nor_deletes_checkpoints(tmp_path: Path, content: bytes, capfd) -> None:
    saved(tmp_path, 1, 2)
    history, kept = tmp_path / "shared" / FILE, sets(tmp_path)
    intact = history.read_bytes()
    history.write_bytes(content)
    with user_error():
        opened(tmp_path)
    RunHistory.note_without_local(tmp_path / "shared", 0)
    assert "warning" in capfd.readouterr().err and history.read_bytes() == content
    assert sets(tmp_path) == kept
    history.write_bytes(intact)
    assert newest(tmp_path) == (2, [], 2.0)


def test_a_folder_that_others_could_have_filled_is_refused(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    path = sets(tmp_path)[0].parents[1]
    path.chmod(0o770)
    with user_error("checkpoint.local.folder"):
        opened(tmp_path)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with user_error("checkpoint.local.folder"):
        opened(tmp_path)
    path.unlink()
    (tmp_path / "elsewhere").chmod(0o700)
    (tmp_path / "elsewhere").rename(path)
    path.parent.chmod(0o777)
    with user_error("checkpoint.local.folder"):
        opened(tmp_path)
    path.parent.chmod(0o1777)
    assert newest(tmp_path)[0] == 1


@pytest.mark.parametrize(
    ("mode", "owner", "base", "own"),
    [
        (0o40700, 1000, True, True),
        (0o41777, 0, True, False),  # /tmp, /local_scratch
        (0o40777, 0, False, False),
        (0o40755, 0, True, False),
        (0o40700, 1001, False, False),
        (0o41777, 1001, False, False),  # its owner may rename entries
        (0o42775, 1000, True, False),
        (0o120777, 1000, False, False),
    ],
)
def test_modes_and_owners_of_folders_that_are_used(mode: int, owner: int, base: bool, own: bool) -> None:
    found = os.stat_result((mode, 0, 0, 1, owner, owner, 0, 0, 0, 0))
    assert (not base_fault(found, 1000)) == base and (not folder_fault(found, 1000)) == own


@pytest.mark.parametrize("process", [0, 1])
def test_links_in_the_folder_are_not_followed(tmp_path: Path, process: int) -> None:
    thesis = victim_in(tmp_path)
    with opened(tmp_path) as local:
        local.begin(0, small(0))
        path = local.store.path
    shutil.rmtree(path / "process_0")
    (path / f"process_{process}").symlink_to(thesis.parent)
    if process == 0:
        with user_error():
            opened(tmp_path)
    else:
        with opened(tmp_path) as local:
            local.clear()
    assert thesis.read_text() == "years"


def test_a_copy_of_a_run_does_not_use_its_local_checkpoints(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    copy = tmp_path / "copy"
    shutil.copytree(tmp_path / "shared", copy / "shared")
    (copy / "node").symlink_to(tmp_path / "node")
    with user_error():
        opened(copy)
    assert newest(tmp_path)[0] == 1


def test_a_run_that_was_moved_keeps_its_local_checkpoints(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    moved = tmp_path / "moved"
    moved.mkdir()
    (tmp_path / "shared").rename(moved / "shared")
    (moved / "node").symlink_to(tmp_path / "node")
    assert newest(moved)[0] == 1
    saved(tmp_path, 5)  # another run where it was
    assert newest(moved)[0] == 1


def test_only_local_checkpoints_of_a_former_run_are_removed(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    other = tmp_path / "node" / "results"
    other.mkdir()
    shutil.copy(sets(tmp_path)[0].parents[1] / "run.json", other)
    (tmp_path / "shared" / FILE).unlink()
    assert newest(tmp_path)[0] is None
    assert (other / "run.json").exists() and not sets(tmp_path)


def test_a_set_that_names_other_files_is_refused(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    (path,) = sets(tmp_path)
    write_manifest(path, read_manifest(path) | {"../../../victim": entry_of(b"")})
    with pytest.raises(Damaged, match="names files outside the step"):
        LocalSet.open(path)


def test_a_set_of_an_earlier_version_is_refused_and_kept(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    (path,) = sets(tmp_path)
    (path / FORMER).write_text("{}")
    with user_error():
        opened(tmp_path)
    assert sets(tmp_path) == [path]


def test_deleting_a_step_that_is_a_link_deletes_the_link(tmp_path: Path) -> None:
    thesis = victim_in(tmp_path)
    for name in ("00000001", "00000002.0a.saving"):
        (tmp_path / name).symlink_to(thesis.parent)
    FolderSteps(tmp_path).delete(1)
    step_folders.remove_unfinished(tmp_path)
    assert thesis.exists() and sorted(path.name for path in tmp_path.iterdir()) == ["victim"]


def test_a_link_that_looks_like_an_abandoned_conversion_is_left_alone(tmp_path: Path) -> None:
    thesis = victim_in(tmp_path)
    (thesis.parent / LOCK).write_text("")
    link = tmp_path / f"out.0a0b0c0d{SUFFIX}"
    link.symlink_to(thesis.parent)
    with new_folder(tmp_path / "out"):
        pass
    assert thesis.exists() and link.is_symlink()
