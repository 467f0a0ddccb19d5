"""The doctor on this machine: what hangs is given up, stand-ins for nvidia-smi, and the real run."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest
from gpu_stand_in import MEMORY, stand_in

from megajax.reporting.machine import devices, gpus, storage
from megajax.reporting.machine.check import run_checks
from megajax.reporting.machine.machine import Devices, Machine, run_limited

SMI = """#!/bin/sh
case "$1" in
  *driver_version*) echo "0, NVIDIA H100 80GB HBM3, 550.54.15, 9.0, 81559, 4";;
  *clocks_event_reasons*) echo 'Field "clocks_event_reasons.hw_slowdown" is not a valid field to query.'; exit 2;;
  *clocks_throttle_reasons*) echo "0, Not Active, Active, Not Active, Not Active";;
  *ecc*) echo "0, Enabled, 0, 33";;
  *remapped*) echo "0, No, No";;
  *pcie*) echo "0, 16, 16, Enabled, Disabled";;
esac
"""


class FakeMachine(Machine):
    """This machine, with as many GPUs as one wants."""

    gpu_files = 1


def with_program(folder: Path, name: str, text: str) -> Machine:
    """A machine on whose path a program of this name comes first."""
    folder.mkdir(exist_ok=True)
    program = folder / name
    program.write_text(text)
    program.chmod(0o755)
    machine = FakeMachine(environment=os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"})
    return machine


def test_a_command_that_hangs_is_given_up_with_its_children() -> None:
    begun = time.monotonic()
    output = run_limited(["sh", "-c", "echo before; sleep 60 & sleep 60"], seconds=0.3)
    assert time.monotonic() - begun < 30
    assert output.code is None and output.out == "before\n" and output.why == "did not come back within 0.3 s"


def test_a_command_that_is_not_there() -> None:
    output = run_limited(["/no/such/program"], seconds=1)
    assert output.code is None and "cannot be started" in output.why


def test_a_program_that_hangs_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = with_program(tmp_path, "nvidia-smi", f"#!/bin/sh\necho x >> {tmp_path}/asked\nsleep 60\n")
    monkeypatch.setattr(gpus, "SMI_SECONDS", 0.3)
    results = {result.name: result for result in run_checks(gpus.CHECKS, machine)}
    assert results["GPUs"].status == "fail" and "did not come back within 0.3 s" in results["GPUs"].found
    assert (tmp_path / "asked").read_text().count("x") == 1


def test_what_nvidia_smi_tells(tmp_path: Path) -> None:
    machine = with_program(tmp_path, "nvidia-smi", SMI)
    with_program(tmp_path, "dmesg", "#!/bin/sh\necho '[9] NVRM: Xid (PCI:0000:17:00): 94, pid=1'\n")
    results = {result.name: (result.status, result.found) for result in run_checks(gpus.CHECKS, machine)}
    assert results["GPUs"] == ("ok", "1 x NVIDIA H100 80GB HBM3 (capability 9.0, 80 GiB)")
    assert results["GPU errors"][0] == results["GPU memory"][0] == results["GPU slots"][0] == "ok"
    assert results["GPU clocks"] == ("warn", "GPU 0: hw thermal slowdown"), "asked by the older names"
    assert results["GPU log"] == ("fail", "Xid 94 at 0000:17:00")
    assert "GPU links" not in results, "one GPU has no links"


@pytest.mark.parametrize(
    ("last", "why"),
    [
        ("time.sleep(60)", "did not come back within 1 s"),
        ("print('why', file=sys.stderr); sys.exit(3)", "ended with code 3: why"),
        ("os.kill(os.getpid(), 11)", "was killed by signal 11"),
    ],
)
def test_a_stage_that_hangs_or_crashes_is_named(last: str, why: str) -> None:
    program = (
        "import json, os, sys, time\n"
        "def say(**line): print(json.dumps(line), flush=True)\n"
        'say(begins="devices"); say(stage="devices", found=[1], seconds=0.1); print("noise"); say(begins="matmul")\n'
    )
    begun = time.monotonic()
    stages = Devices(dict(os.environ), (sys.executable, "-S", "-c", program + last), seconds=1).stages()
    assert time.monotonic() - begun < 30
    assert stages.done == {"devices": [1]} and stages.stopped_in == "matmul" and stages.why == why


def test_the_disk_of_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    folder, told = storage.probe(Machine(tmp_path / "runs" / "first"))
    assert folder == str(tmp_path) and isinstance(told, dict)
    assert told["bytes"] > 0 and told["free"] > 0 and abs(told["skew"]) < 1
    assert list(tmp_path.iterdir()) == [], "it leaves nothing behind"


def test_this_machine(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("XLA_", "NCCL_"))}
    environment |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}
    command = [sys.executable, "-m", "megajax.doctor", f"--run-dir={tmp_path}", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    told = json.loads(done.stdout)
    checks = {check["name"]: check for check in told["checks"]}
    failed = [check for check in told["checks"] if check["status"] == "fail"]
    assert done.returncode == told["exit_code"] == int(bool(failed))
    if not list(Path("/dev").glob("nvidia[0-9]*")):
        assert not failed and checks["GPUs"]["status"] == "warn"
        assert checks["devices"]["found"] == "2 x cpu (cpu)"
        assert checks["all-reduce"]["status"] == "ok" and "exact over 2 devices" in checks["all-reduce"]["found"]
        assert checks["matmul"]["status"] == checks["attention"]["status"] == "ok"
    assert {"python", "packages", "disk", "disk space", "clock", "open files", "host name", "memory"} <= checks.keys()


def test_stages_on_gpus_try_every_kernel_and_tell_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CPU devices that present themselves as GPUs; the reference computes what a kernel is asked for."""
    here = jax.local_devices()
    monkeypatch.setattr(jax, "local_devices", lambda: here[:1])
    assert [entry["backend"] for entry in devices.attention() if "error" in entry] == ["reference"]
    assert devices.found()[0]["memory"] is None
    stand_in(monkeypatch)
    tried = devices.attention()
    assert [entry["backend"] for entry in tried] == ["cudnn", "pallas", "cudnn_mask", "reference"]
    assert all(entry["error"] < 1e-2 and "refusal" not in entry for entry in tried)
    (entry,) = devices.found()
    assert (entry["platform"], entry["capability"], entry["memory"]) == ("gpu", "9.0", MEMORY)


def test_front_door_of_the_doctor() -> None:
    command = [sys.executable, "-m", "megajax.doctor"]
    shown = subprocess.run([*command, "--help"], capture_output=True, text=True, timeout=60)
    assert shown.returncode == 0 and "--run-dir" in shown.stdout and "--json" in shown.stdout
    refused = subprocess.run([*command, "--jsn"], capture_output=True, text=True, timeout=60)
    assert refused.returncode == 2 and "did you mean json" in refused.stderr
