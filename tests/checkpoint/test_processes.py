"""Two processes, connected by gloo, save and restore one checkpoint."""

import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from megajax.checkpoint.inspection import describe
from megajax.checkpoint.reader import CheckpointReader


@pytest.mark.slow
def test_two_processes_save_fail_fall_back_and_one_process_reads_it(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    script = Path(__file__).with_name("two_processes.py")
    processes = [
        subprocess.Popen(
            [sys.executable, script, str(index), str(port), tmp_path],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for index, (process, (out, err)) in enumerate(zip(processes, outputs, strict=True)):
        assert process.returncode == 0 and f"process {index} done" in out, err

    values = np.random.default_rng(0).standard_normal((64, 32)).astype(np.float32)
    reader = CheckpointReader(tmp_path)
    step = reader.newest_intact()
    like = {"w": jax.ShapeDtypeStruct((64, 32), np.float32), "r": jax.ShapeDtypeStruct((3,), np.int32)}
    restored, meta = reader.restore(step, like)
    assert (step, meta) == (3, {"step": 3})
    np.testing.assert_array_equal(np.asarray(restored["w"]), values)

    content, arrays = describe(tmp_path, step)
    shapes = {name: array.shape for name, array in arrays.arrays.items()}
    assert content["processes"] == 2 and shapes == {"w": (64, 32), "r": (3,)}
    actual = arrays.statistics("w")
    assert (actual["count"], actual["min"], actual["max"]) == (values.size, values.min(), values.max())
