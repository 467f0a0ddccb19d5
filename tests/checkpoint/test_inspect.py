"""megajax.tools.inspect shows what the manager wrote, reports every kind of damage, and does not change the folder."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from local_sets import damage
from user_errors import user_error

from megajax.checkpoint import manifest, zarr_reader
from megajax.checkpoint.config import CheckpointConfig
from megajax.config.errors import UserError
from megajax.tools import inspect as tool

VALUES = np.random.default_rng(0).standard_normal((64, 32)).astype(np.float32)
HOLED = jnp.array([1.5, jnp.nan, -3.0, jnp.inf, 0.0], jnp.bfloat16)
CONFIG = """
model:
  sequence_length: 128
  hidden: 32
parallel:
  tensor: 2  # command line
  data_sharding: fsdp
"""
META = {
    "config": CONFIG,
    "seed": 7,
    "versions": {"jax": "0.0"},
    "rows": [[0, 2], [3, 4], [2, 3]],
    "mesh": {"data": 2, "tensor": 4},
    "axes": {"stack.w": ["embed", None], "w": ["vocab", "embed"]},
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Steps 1 and 2 of a run; the array `params.stack.w` is sharded over eight devices."""
    run = tmp_path_factory.mktemp("a run, 100%")
    mesh = jax.make_mesh((8,), ("all",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded = jax.device_put(VALUES, NamedSharding(mesh, PartitionSpec(None, "all")))
    state = {
        "params": {"stack": {"w": sharded}, "w": HOLED},
        "optimizer": {"first_moment": {"stack": {"w": jnp.zeros((64, 32))}}, "none": jnp.zeros((0, 4))},
        "consumed_samples": jnp.uint32(40),
        "loss_scale": jnp.float32(jnp.inf),
    }
    with CheckpointConfig(keep_last=None).build(run / "checkpoints") as manager:
        for step in (1, 2):
            manager.save(step, state, META)
    return run


@pytest.fixture
def run(checkpoints, tmp_path):
    """A copy that a test may damage."""
    shutil.copytree(checkpoints, tmp_path / "run")
    return tmp_path / "run"


def files_of(folder: Path) -> dict[str, tuple[str, int]]:
    """Contents and dates of all files, names of all folders."""
    return {
        str(path): ("" if path.is_dir() else hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
    }


def as_json(capsys, *words) -> dict:
    capsys.readouterr()
    tool.main([*map(str, words), "--json"])
    return json.loads(capsys.readouterr().out)


def largest(step: Path) -> Path:
    return max((path for path in step.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def test_a_step_is_described(checkpoints, capsys):
    actual = as_json(capsys, checkpoints)
    assert [(step["step"], step["state"], step["verified"]) for step in actual["steps"]] == [
        (1, "whole", False),
        (2, "whole", False),
    ]
    assert actual["step"] == 2 and actual["counters"] == {"consumed_samples": 40, "loss_scale": "inf"}
    assert (actual["consumed_tokens"], actual["seed"], actual["versions"]) == (40 * 128, 7, {"jax": "0.0"})
    assert (actual["processes"], actual["mesh"]) == (1, {"data": 2, "tensor": 4})
    assert actual["rows"] == [[0, 2], [3, 4], [2, 3]]
    arrays = {array.pop("name"): array for array in actual["arrays"]}
    # Arrays without elements are not stored.
    assert sorted(arrays) == [
        *("consumed_samples", "loss_scale", "optimizer.first_moment.stack.w", "params.stack.w", "params.w")
    ]
    assert arrays["params.stack.w"] == {
        **{"shape": [64, 32], "dtype": "float32", "pieces": [1, 8], "elements": 2048, "bytes": 8192},
        "axes": ["embed", None],
    }
    assert arrays["optimizer.first_moment.stack.w"]["axes"] == ["embed", None]
    # Axes of another number of dimensions than the array's belong to something else.
    assert (arrays["params.w"]["dtype"], arrays["params.w"]["bytes"], arrays["params.w"]["axes"]) == (
        *("bfloat16", 10),
        None,
    )
    assert actual["groups"] == {
        "counters": {"arrays": 2, "elements": 2, "bytes": 8},
        "optimizer": {"arrays": 1, "elements": 2048, "bytes": 8192},
        "params": {"arrays": 2, "elements": 2053, "bytes": 8202},
    }


def test_the_text_shows_what_the_json_has(checkpoints, capsys, tmp_path):
    assert tool.main([str(checkpoints / "checkpoints/00000001"), f"--json={tmp_path / 'out.json'}"]) == 0
    text = capsys.readouterr().out
    for line in (
        "step 1\n",
        "counters   consumed_samples 40, loss_scale inf",
        "5,120 consumed",
        "mesh       data 2, tensor 4",
        "layers     0-1 | 3 | 2",
        "model.hidden=32, model.sequence_length=128, parallel.data_sharding=fsdp",
        "64 x 32  float32   embed, -  1 x 8   8.0 KiB",
        "params     2       2,053     8.0 KiB",
    ):
        assert line in text
    assert json.loads((tmp_path / "out.json").read_text())["step"] == 1


def test_a_step_without_metadata_and_an_array_without_finite_elements(tmp_path, capsys, monkeypatch):
    with CheckpointConfig().build(tmp_path / "run") as manager:
        manager.save(3, {"w": jnp.full(4, jnp.nan)})
    monkeypatch.chdir(tmp_path)
    assert tool.main([f"../{tmp_path.name}/run", "--array=w"]) == 0
    text = capsys.readouterr().out
    assert "not finite  4" in text and "mean        no finite element" in text
    assert tool.main(["run"]) == 0
    text = capsys.readouterr().out
    assert "w     4      float32" in text and "axes" not in text and "seed" not in text


def test_statistics_of_an_array_in_blocks(checkpoints, capsys, monkeypatch):
    monkeypatch.setattr(zarr_reader, "BLOCK", 37)
    actual = as_json(capsys, checkpoints, "--array=params.stack.w")["array"]
    exact = VALUES.astype(np.float64)
    assert (actual["count"], actual["nonfinite"]) == (2048, 0)
    assert (actual["min"], actual["max"]) == (exact.min(), exact.max())
    np.testing.assert_allclose([actual["mean"], actual["rms"]], [exact.mean(), np.sqrt((exact**2).mean())], rtol=1e-12)

    holed = as_json(capsys, checkpoints, "--array=params.w")["array"]
    assert (holed["dtype"], holed["count"], holed["nonfinite"]) == ("bfloat16", 5, 2)
    assert (holed["min"], holed["max"], holed["mean"]) == (-3.0, 1.5, -0.5)
    np.testing.assert_allclose(holed["rms"], np.sqrt((1.5**2 + 3**2) / 3))


def test_verify_names_the_file_and_both_values(run, capsys):
    assert tool.main([str(run), "--verify"]) == 0
    assert capsys.readouterr().out.count("whole, every file verified") == 2
    path = largest(run / "checkpoints/00000002")
    expected = hashlib.sha256(path.read_bytes()).hexdigest()
    damage(path)
    actual = hashlib.sha256(path.read_bytes()).hexdigest()
    name = path.relative_to(run / "checkpoints/00000002").as_posix()
    assert tool.main([str(run), "--verify"]) == 2
    text = capsys.readouterr().out
    assert f"{name}: sha256 {actual}, the manifest says {expected}" in text
    assert "\nstep 1\n" in text  # the newest intact one
    with user_error() as caught:
        tool.main([str(run), "--verify", "--step=2"])
    assert "Intact steps: 1" in str(caught.value)
    # The contents of the other step are not read then.
    assert tool.main([str(run), "--verify", "--step=1"]) == 0


def test_a_wrong_size_is_found_without_verify(run, capsys):
    path = largest(run / "checkpoints/00000002")
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-5])
    actual = as_json(capsys, run)
    assert actual["step"] == 1 and actual["steps"][1]["state"] == "damaged"
    assert actual["steps"][1]["faults"][0].endswith(f"{size - 5} bytes, the manifest says {size}")
    path.unlink()
    assert as_json(capsys, run)["steps"][1]["faults"][0].endswith("No such file or directory")


def test_a_damaged_manifest_is_named_in_one_message(run):
    steps = run / "checkpoints"
    (steps / "00000002/manifest.json").unlink()
    with user_error():
        tool.main([str(run), "--step=2"])
    (steps / "00000001/manifest.json").write_text("{")
    with user_error():
        tool.main([str(run)])


@pytest.mark.parametrize("name", ["meta.json", "arrays/state/manifest.ocdbt"])
def test_unreadable_metadata_of_the_right_size_and_even_checksum(run, name):
    step = run / "checkpoints/00000002"
    size = (step / name).stat().st_size
    (step / name).write_bytes(b"x" * size)
    with user_error():
        tool.main([str(run)])
    manifest.write_manifest(step, manifest.read_manifest(step) | manifest.hash_files(step, [name]))
    with user_error() as caught:
        tool.main([str(run)])
    assert len(str(caught.value)) < 600


def test_unfinished_steps_and_those_set_aside_are_listed(run, capsys):
    steps = run / "checkpoints"
    (steps / "00000003.5f0c9a1e0002.saving").mkdir()
    (steps / "00000003.5f0c9a1e0002.saving/part").write_bytes(b"12345")
    (steps / "00000001").rename(steps / "00000001.damaged2")
    actual = {step["name"]: step for step in as_json(capsys, run)["steps"]}
    assert actual["00000003.5f0c9a1e0002.saving"]["state"].startswith("being written")
    assert actual["00000003.5f0c9a1e0002.saving"]["bytes"] == 5
    assert actual["00000001.damaged2"]["state"] == "damaged, set aside"
    with user_error():
        tool.main([str(run), "--step=1"])


def test_impossible_requests(checkpoints, tmp_path):
    (checkpoints.parent / "a_file").touch()
    for words, message in (
        ([tmp_path / "typo"], "does not exist"),
        ([tmp_path], "no checkpoints in"),
        ([checkpoints, "--step=9"], r"no checkpoint of step 9 .*\nIntact steps: 1, 2"),
        ([checkpoints, "--array="], "no array"),
        ([checkpoints, "--verify", "--array=params.w"], "give one of them"),
        ([checkpoints.parent / "a_file"], "it is a file, not a folder"),
        ([checkpoints, "--array=param.stack.w"], r"no array param\.stack\.w\n +did you mean params\.stack\.w"),
        (["--step=1"], "first argument must be"),
        ([checkpoints, f"--json={tmp_path}"], "can't be written"),
    ):
        with pytest.raises(UserError, match=message):
            tool.main([str(word) for word in words])


def test_a_read_only_folder_is_inspected_without_changes_and_without_jax(checkpoints):
    before = files_of(checkpoints)
    program = f"""
import sys
from megajax.tools.inspect import main
for words in ([], ["--verify"], ["--array=params.w"], ["--json"]):
    assert main([{str(checkpoints)!r}, *words]) == 0
assert not {{"jax", "orbax", "flax", "rich"}} & set(sys.modules)
"""
    folders = [checkpoints, *(path for path in checkpoints.rglob("*") if path.is_dir())]
    for folder in folders:
        folder.chmod(0o555)
    try:
        subprocess.run([sys.executable, "-c", program], check=True, env=os.environ, stdout=subprocess.DEVNULL)
    finally:
        for folder in folders:
            folder.chmod(0o755)
    assert files_of(checkpoints) == before
