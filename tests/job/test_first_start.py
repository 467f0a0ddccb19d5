"""The first start of a job on GPUs, and every later one, walked through on CPU devices that present themselves as GPUs.

Whatever decides on the platform decides here as on an H100: options, kernels, memory, rates. See docs/platforms.md.
"""

import os
import re
import sys
from pathlib import Path
from typing import Any

import gangs
import jax
import pytest
from gpu_stand_in import KIND, MEMORY, stand_in
from run_folder import lines, steps
from small_jobs import DOCUMENTS, model, run_config

from megajax.checkpoint.config import CheckpointConfig
from megajax.data.text.config import MockConfig
from megajax.faults.config import ResilienceConfig
from megajax.job.job import train
from megajax.job.start.compile_cache import use_cache
from megajax.machine.known_faults import NO_GRAPHS
from megajax.mesh.config import ParallelConfig
from megajax.optim.config import AdamWConfig
from megajax.precision.config import PrecisionConfig
from megajax.processes.gpus import SET_BY_MEGAJAX, SEVERAL_GPUS
from megajax.processes.xla_options import XlaConfig, compiler_options, set_process
from megajax.tasks.end_of_run_samples import sample
from megajax.training.check_compiler_options import default_options
from megajax.training.config import BatchConfig, EvaluationConfig
from megajax.training.run_config import RunConfig

GIVEN = {"xla_backend_optimization_level": "0", "xla_llvm_disable_expensive_passes": "true"}
"""Flags that have XLA compile the same programs to slower machine code."""


def config(folder: Path, **changes: Any) -> RunConfig:
    """Three steps in attempts of two, in bfloat16, with evaluations and checkpoints in between."""
    settings = {
        "model": model(heads=2, kv_heads=2, hidden=32, repeats=1, dropout=0.0, recompute="full"),
        "parallel": ParallelConfig(data=2, tensor=2, data_sharding="fsdp"),
        "batch": BatchConfig(global_size=4, micro_size=2),
        "data": MockConfig(documents=DOCUMENTS, isolate_documents=True),
        "precision": PrecisionConfig(),
        "optimizer": AdamWConfig(offload=0.5),
        "evaluation": EvaluationConfig(every=2, batches=1),
        "checkpoint": CheckpointConfig(every=2),
        "resilience": ResilienceConfig(exit_after_steps=2),
        "xla": XlaConfig(options=GIVEN, deterministic=True, compile_cache_dir=str(folder / "compiled")),
        "steps": 3,
    }
    return run_config(folder / "run", **settings | changes)


@pytest.fixture
def programs(monkeypatch) -> list[dict[str, Any]]:
    """The options of every program that is compiled with options."""
    actual, plain = [], jax.jit

    def jit(*args: Any, **more: Any) -> Any:
        actual.extend([more["compiler_options"]] if more.get("compiler_options") else [])
        return plain(*args, **more)

    monkeypatch.setattr(jax, "jit", jit)
    return actual


def walk(cfg: RunConfig) -> None:
    """A first start, a resumed start, and an evaluation."""
    set_process(cfg.xla)
    use_cache(cfg.xla)
    assert train(cfg, sampler=sample) == 0
    assert train(cfg, sampler=sample) == 0
    assert train(cfg, skip_train=True) == 0
    folder = Path(cfg.run_dir)
    assert list(steps(folder)) == [1, 2, 3]
    assert [line["split"] for line in lines(folder) if "split" in line] == ["validation", "validation", "test"]


def test_a_GPU_job_from_its_first_start_to_an_evaluation(tmp_path, monkeypatch, capsys, programs, cache):
    stand_in(monkeypatch)
    monkeypatch.setenv(SET_BY_MEGAJAX, SEVERAL_GPUS.name)
    monkeypatch.setenv(SEVERAL_GPUS.name, SEVERAL_GPUS.value)
    cfg = config(tmp_path)
    walk(cfg)
    wanted = compiler_options(*default_options(cfg, "gpu")) | {**GIVEN, "xla_llvm_disable_expensive_passes": True}
    wanted |= {NO_GRAPHS.name: NO_GRAPHS.value}
    assert {"xla_gpu_pipeline_all_gather", "xla_gpu_deterministic_ops"} <= wanted.keys()
    assert programs and all(options == wanted for options in programs)
    text = capsys.readouterr().out
    assert f"4 x {KIND} (4 of 8 used), 1 process" in text
    assert "attention cudnn" in text and "xla_gpu_enable_latency_hiding_scheduler=True" in text
    single_spaced = " ".join(text.split())
    assert "NCCL_LAUNCH_MODE=GROUP (MegaJAX)" in single_spaced
    assert "GPU memory 0.92 of it for arrays" in single_spaced and ", step 2 of" in single_spaced
    assert "known fault CUDA graphs with cuDNN's attention are not captured" in single_spaced
    assert "peak memory of a device 2.0 MiB of 72.00 GiB" in single_spaced
    assert "throughput per GPU (TFLOP/s/GPU): 0.0" in text and "Megatron-LM's formula" in text
    # By XLA's own times, and by those of the cost model.
    assert len(list((tmp_path / "compiled").glob("jax-*-gpu/jit_train_step-*-cache"))) == 2
    first = lines(tmp_path / "run")[0]
    assert first["memory_device"] == 2**20 < MEMORY and first["mfu_causal"] > 0


@pytest.mark.slow
def test_a_job_on_GPUs_in_a_pipeline(tmp_path, monkeypatch, programs, cache):
    stand_in(monkeypatch)
    layout = ParallelConfig(data=2, tensor=2, pipeline=2, sequence=True)
    shape = {"heads": 2, "kv_heads": 2, "hidden": 32, "repeats": 4, "dropout": 0.0, "recompute": "full"}
    cfg = config(tmp_path, parallel=layout, model=model(**shape), batch=BatchConfig(global_size=16, micro_size=2))
    walk(cfg)
    wanted = compiler_options(*default_options(cfg, "gpu"))
    assert wanted and all(wanted.items() <= options.items() for options in programs)


QUICK = "--xla=" + ",".join(f"{name}={value}" for name, value in GIVEN.items())
SECONDS = 600


@pytest.mark.slow
def test_the_command_line_with_options(start, tmp_path):
    """Two processes: a first start, one that resumes from its checkpoint, and an evaluation."""
    words = ("--config=llama3.py:debug", "--xla=xla_cpu_enable_fast_math=false", "--parallel.tensor=2", "--steps=2")
    for attempt, more in enumerate((["--resilience.exit_after_steps=1"], [], ["--skip-train"])):
        command = (*gangs.launcher(), *gangs.TRAIN, *words, QUICK, "--devices=cpu:2")
        run = start(*command, f"--run_dir={tmp_path / 'run'}", *more, name=f"attempt-{attempt}")
        assert run.wait(SECONDS) == 0, run.text
        assert re.search("XLA, as asked +xla_cpu_enable_fast_math=False, ", run.text)
    assert list(gangs.losses(tmp_path / "run")) == [1, 2]


@pytest.mark.slow
def test_two_processes_with_two_gpus_each(start, tmp_path):
    """The whole command, on CPU devices that present themselves as GPUs."""
    program = Path(__file__).with_name("train_on_stand_ins.py")
    words = ("--batch.micro_size=2", "--parallel.data=2", "--parallel.tensor=2", "--devices=cpu:2")
    paths = os.pathsep.join(map(str, [gangs.REPOSITORY, gangs.REPOSITORY / "tests", Path(__file__).parent]))
    command = (*gangs.launcher(), sys.executable, program, f"--config={gangs.CONFIG}", QUICK, *words)
    run = start(*command, f"--run_dir={tmp_path / 'run'}", PYTHONPATH=paths)
    assert run.wait(SECONDS) == 0, run.text
    assert f"4 x {KIND}, 2 processes, 2 on this machine, this one with 2" in run.text.replace("\n", " ")
    assert "xla_gpu_enable_latency_hiding_scheduler=True" in run.text
    assert list(gangs.losses(tmp_path / "run")) == [1, 2, 3, 4, 5, 6]
