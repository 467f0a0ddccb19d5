"""Device tests before a run: sound devices pass, faults are named, and no run starts with one."""

import json
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_stand_in import stand_in
from peer_threads import together
from small_jobs import run_config
from user_errors import user_error

from megajax.faults.config import HealthConfig, ResilienceConfig
from megajax.job.job import train
from megajax.machine import before_run, host_checks
from megajax.machine.before_run import Unfit, demand_health, refusals
from megajax.machine.check import fail, ok
from megajax.machine.gpu_health import Symptom
from megajax.processes.peers import Peers


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(before_run, "CHUNK_BYTES", 2**16)
    monkeypatch.setattr(before_run, "TRANSFER_BYTES", 2**20)


@pytest.mark.usefixtures("small")
def test_this_machine_passes(tmp_path):
    results = dict(before_run.tests(tmp_path / "not" / "yet", Peers("test")))
    assert [*results] == ["matmul", "all-reduce", "host to device", "disk"], "no clocks to compare, no GPUs"
    assert {finding.status for finding in results.values()} <= {"ok", "warn"}
    assert results["matmul"].state == "exact on 8 devices, 5 times"
    assert results["all-reduce"].state.startswith("exact over 8 devices, 5 times, in chunks of 64.0 KiB")
    assert str(tmp_path) in results["disk"].state


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("wrong", ["reduce-scatter", "all-reduce"])
def test_wrong_sums_are_named_with_their_device(wrong, monkeypatch):
    correct_sum = before_run.reduce_shards

    def reduce_shards(x, moves, also=()):
        out = correct_sum(x, moves, also)
        faulty = (jax.lax.axis_index("devices") == 3) & (bool(moves) == (wrong == "reduce-scatter"))
        return out.at[7].add(faulty.astype(out.dtype))

    monkeypatch.setattr(before_run, "reduce_shards", reduce_shards)
    status, state, _ = before_run.all_reduce(Peers("test"))
    assert status == "fail" and state.endswith(f"wrong sums over 8 devices: {wrong} on device 3")


def test_wrong_products_are_named_with_their_device(monkeypatch):
    device_put_before = jax.device_put

    def device_put(x, device):
        return device_put_before(x.at[0, 0].add(1), device) if device.id == 2 else device_put_before(x, device)

    monkeypatch.setattr(before_run.jax, "device_put", device_put)
    assert before_run.matmul()[:2] == ("fail", "wrong products on devices 2 (float32), 2 (bfloat16)")


def test_products_in_fewer_bits_are_wrong(monkeypatch):
    """float32 without its last bits, as TF32 is."""
    device_put_before = jax.device_put

    def device_put(x, device):
        bits = np.asarray(x, np.float32).view(np.uint32) >> 13 << 13
        return device_put_before(jnp.asarray(bits.view(np.float32), x.dtype), device)

    monkeypatch.setattr(before_run.jax, "device_put", device_put)
    state = before_run.matmul().state
    assert state.startswith("wrong products on devices 0 (float32), 1 (float32)") and "bfloat16" not in state


def test_products_that_are_wrong_in_some_runs_are_found(monkeypatch):
    runs = iter(range(1000))
    compare = np.array_equal
    monkeypatch.setattr(before_run.np, "array_equal", lambda a, b: next(runs) != 3 and compare(a, b))
    assert before_run.matmul().state == "wrong products on devices 0 (float32)"


def test_an_error_is_a_failure_of_its_test(monkeypatch, tmp_path):
    def broken():
        raise jax.errors.JaxRuntimeError("INTERNAL: the device is gone")

    monkeypatch.setattr(before_run, "matmul", broken)
    for name in ("all_reduce", "transfer", "clocks"):
        monkeypatch.setattr(before_run, name, lambda peers: None)
    first, *_ = before_run.tests(tmp_path, Peers("test"))
    assert first[0] == "matmul"
    assert first[1][:2] == ("fail", "JaxRuntimeError: INTERNAL: the device is gone")


def test_a_slow_link_and_differing_clocks_are_warnings(monkeypatch):
    rates = iter((2.0**20, 9 * 2.0**20, 9 * 2.0**20))
    monkeypatch.setattr(before_run, "measure_transfer", lambda measured: measured.append(next(rates)))
    results = together(3, before_run.transfer)
    assert sorted(finding[:2] for finding in results) == [
        ("ok", "9.0 MiB/s at least"),
        ("ok", "9.0 MiB/s at least"),
        ("warn", "1.0 MiB/s at least, the median of the processes is 9.0 MiB/s"),
    ]
    skew = iter((0.0, 3.0))
    monkeypatch.setattr(before_run.time, "time", lambda: next(skew))
    findings = together(2, before_run.clocks)
    assert [finding[:2] for finding in findings] == [("warn", "3.00 s apart, of 2 processes")] * 2


@pytest.mark.usefixtures("small")
def test_a_process_whose_own_part_fails_still_takes_part(monkeypatch, tmp_path):
    """If it did not, the others would wait in a collective that it has skipped."""

    def part(work):
        def or_error(*arguments):
            if threading.current_thread().name == "1":
                raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
            return work(*arguments)

        return or_error

    def run(peers):
        threading.current_thread().name = str(peers.index)
        return dict(before_run.tests(tmp_path, peers))

    monkeypatch.setattr(before_run, "measure_transfer", part(before_run.measure_transfer))
    monkeypatch.setattr(before_run.jax, "make_array_from_callback", part(jax.make_array_from_callback))
    monkeypatch.setattr(before_run, "compare_sums", lambda *_: ok("exact"))
    results = together(2, run)
    assert results[1]["host to device"][0] == results[1]["all-reduce"][0] == "fail"
    assert results[0]["host to device"][0] == "ok"
    assert results[0]["all-reduce"][1].startswith("not run: process 1: JaxRuntimeError: RESOURCE")


def test_memory_errors_of_gpus_are_failures(monkeypatch):
    symptoms = [Symptom(0, "slowdowns", "HwSlowdown")]

    class Health:
        def __init__(self, nvml, gpus):
            assert nvml == "nvml" and len([*gpus]) == 8

        def poll(self):
            return symptoms

    assert before_run.gpu_health() is None, "not on CPUs"
    stand_in(monkeypatch)
    monkeypatch.setattr(before_run, "load_nvml", lambda: ("nvml", ""))
    monkeypatch.setattr(before_run, "GpuHealth", Health)
    assert before_run.gpu_health()[:2] == ("warn", "GPU 0: slowdowns HwSlowdown")
    symptoms.append(Symptom(1, "uncorrected_errors", 2))
    assert before_run.gpu_health()[0] == "fail"
    symptoms.clear()
    assert before_run.gpu_health() == ok("no memory errors, no slowdown")
    monkeypatch.setattr(before_run, "load_nvml", lambda: (None, "nvidia-ml-py is not installed"))
    assert before_run.gpu_health()[0] == "warn"


@pytest.mark.usefixtures("small")
def test_no_run_starts_on_a_machine_that_fails(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(host_checks, "TOO_LITTLE_SPACE", 2**60)
    cfg = run_config(tmp_path, resilience=ResilienceConfig(health=HealthConfig(before_run=True)))
    with user_error(kind=Unfit) as caught:
        train(cfg)
    assert caught.value.code == 1
    assert not (tmp_path / "metrics.jsonl").exists()
    assert "health before the run: matmul exact" in capsys.readouterr().out


def test_all_processes_refuse_if_one_fails(monkeypatch, tmp_path):
    outcomes = [ok("exact")], [fail("wrong products", "replace it")]
    assert together(2, lambda peers: refusals(peers, outcomes[peers.index])) == [[1], [1]]
    monkeypatch.setattr(before_run, "tests", lambda run_dir, peers: iter([("matmul", ok("exact"))]))
    monkeypatch.setattr(before_run, "refusals", lambda peers, results: [1])
    events = []
    with user_error(kind=Unfit):
        demand_health(tmp_path, print, lambda name, **fields: events.append((name, fields)))
    assert events[0][0] == "health_checks" and events[0][1]["failed"] == [1] and events[0][1]["matmul"] == "exact"
    assert json.dumps(events)
