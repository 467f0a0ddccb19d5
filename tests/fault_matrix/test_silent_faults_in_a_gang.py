"""Faults that no process notices by itself: a NaN that passes, a damaged copy, a slow process."""

import sys

import gangs
import pytest
from run_folder import events, lines, saved, steps

QUIET = ("--checkpoint.every=none", "--evaluation.at_end=false", "--model.dropout=0")


@pytest.mark.slow
def test_a_flipped_bit_ends_the_run_and_is_never_saved(start, tmp_path):
    """The run ends at the next check, with 17; the save due at that step is not made."""
    run = tmp_path / "run"
    settings = (*gangs.TINY, f"--run_dir={run}", "--parallel.data_sharding=replicate", "--checkpoint.every=2")
    checks = ("--resilience.replicas.every=3", "--resilience.inject=bitflip:step=5:process=1")
    gang = start(*gangs.launcher(), *gangs.TRAIN, *settings, *checks)
    assert gang.wait() == 17, gang.text
    (event,) = events(run, "replica_mismatch")
    assert event["step"] == 6 and event["processes"] == [0, 1] and event["weight"].startswith("params.")
    assert saved(run) == [2, 4], "step 6 was due"
    assert "hold different bytes" in gang.text and "(process 1)" in gang.text
    assert "Traceback" not in gang.text


@pytest.mark.slow
def test_a_process_that_computes_wrong_numbers_is_found(start, tmp_path):
    """A device that reproducibly computes different gradients ends the run; one that does so once does not."""
    losses = {}
    settings = (gangs.TINY[0], "--devices=cpu:2", "--batch.micro_size=1", "--parallel.data=4", *QUIET)
    checks = ("--resilience.recompute.every=2", "--resilience.inject=wrong_gradients:step=4:process=1")
    for name, more, code in (("once", checks, 0), ("always", (*checks[:1], checks[1] + ":always"), 17)):
        run = tmp_path / name
        command = (*gangs.launcher(), *gangs.TRAIN, *settings, f"--run_dir={run}", *more)
        gang = start(*command, name=name)
        assert gang.wait() == code, gang.text
        losses[name] = gangs.losses(run)
        (event,) = events(run, "recompute_mismatch")
        assert event["step"] == 4 and event["processes"] == [1] and event["reproducible"] == (name == "always")
    assert list(losses["once"]) == [1, 2, 3, 4, 5, 6] and list(losses["always"]) == [1, 2, 3, 4]
    assert losses["always"].items() <= losses["once"].items(), "the check changes nothing"
    assert "(process 1) reproducibly computed other gradients" in gang.text and "2 other groups agree" in gang.text


@pytest.mark.slow
def test_a_process_that_sleeps_is_a_straggler(start, tmp_path):
    """It is named within ten steps, with the phase that is slow."""
    run, fault = tmp_path / "run", "--resilience.inject=slow:step=6:process=1"
    settings = (*gangs.TINY, *QUIET, f"--run_dir={run}", "--steps=20", "--logging.every=5", fault)
    gang = start(*gangs.launcher(), *gangs.TRAIN, *settings)
    assert gang.wait() == 0, gang.text
    told = [event for event in events(run, "straggler") if event["phase"] == "data_wait"]
    assert [event["process"] for event in told] == [1], told
    assert told[0]["step"] <= 15 and told[0]["since_step"] >= 5 and told[0]["factor"] > 2
    assert "process 1 is slow since step" in gang.text and "for data wait" in gang.text


@pytest.mark.slow
def test_all_processes_are_tested_together(start, tmp_path):
    """The doctor tests them here. A run does the same before it begins: test_processes_that_differ.py."""
    doctor = (sys.executable, "-m", "megajax.doctor", "--before-run", "--devices=cpu:1", "--json")
    gang = start(*gangs.launcher(), *doctor, name="doctor")
    assert gang.wait() == 0, gang.text
    assert gang.text.count("exact over 2 devices, 5 times, in chunks of 4.0 MiB") == 2
    assert gang.text.count("apart, of 2 processes") == 2


@pytest.mark.slow
def test_a_transient_fault_has_no_effect_in_a_gang(start, tmp_path):
    losses = {}
    for name, more in (("plain", ()), ("faulty", ("--resilience.inject=nan:step=3,inf:step=4",))):
        settings = (*gangs.TINY, f"--run_dir={tmp_path / name}", "--logging.every=2", "--checkpoint.every=3")
        gang = start(*gangs.launcher(), *gangs.TRAIN, *settings, *more, name=name)
        assert gang.wait() == 0, gang.text
        losses[name] = [(line["loss_hex"], line["grad_norm"]) for line in steps(tmp_path / name).values()]
    assert losses["faulty"] == losses["plain"] and len(losses["plain"]) == 6
    assert [event["step"] for event in events(tmp_path / "faulty", "transient_fault")] == [3, 4]
    told = {line["step"]: line for line in lines(tmp_path / "faulty") if "seconds_data_wait_max" in line}
    assert list(told) == [2, 4, 6]
    assert all(0 < line["seconds_data_wait_min"] <= line["seconds_data_wait_max"] for line in told.values())
    assert told[4]["seconds_save_max"] > 0 and "seconds_save_max" not in told[6]
    assert "data wait per iteration (ms): " in gang.text and "(processes: " in gang.text
