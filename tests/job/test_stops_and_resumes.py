"""A run that is interrupted and goes on equals one without a stop: what a run has, by what happens to it.

A row of STATES is something that a checkpoint must keep, a row of FAULTS an end of an attempt, a row of LAYOUTS what
the attempts run on. CASES says which of them are tried together; on one layout all numbers are equal to the bit.
"""

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from local_sets import damage
from object_stores import serving
from run_folder import events, lines, saved, timeless_steps
from small_jobs import model, run_config
from tiny_runs import with_block

from megajax.checkpoint.config import CheckpointConfig, LocalConfig
from megajax.faults.config import ResilienceConfig
from megajax.faults.drills import DrillFault
from megajax.interop.weights.formats import Reading, open_stored
from megajax.job.job import train
from megajax.job.steps import step_record
from megajax.layers.lora.config import LoRAConfig
from megajax.layers.mlp.config import DenseMLPConfig, GatedMLPConfig
from megajax.layers.moe.config import MoEConfig, RouterConfig
from megajax.layers.norm.config import LayerNormConfig
from megajax.layers.quantization.config import QuantizationConfig
from megajax.mesh.config import ParallelConfig
from megajax.metrics.record import StepRecord
from megajax.models.decoder.config import PredictionConfig
from megajax.optim.config import AdamWConfig, OptaxConfig, ScheduleConfig
from megajax.precision.config import DynamicScaleConfig, Fp8DelayedConfig, Nvfp4Config, PrecisionConfig
from megajax.reporting.attempts import attempts
from megajax.reporting.history import read_history
from megajax.training.config import BatchConfig, EvaluationConfig
from megajax.training.run_config import RunConfig
from megajax.training.session import Run, StepInfo

STEPS = 6
ONE = ParallelConfig(data=1)
WIDE = model(hidden=64, ffn=64, dropout=0.0, repeats=1)
LARGE = model(hidden=48, heads=6, kv_heads=2, ffn=96, repeats=4)


def gpt() -> Any:
    """Learned positions, layer norms, dense feed-forward layers, dropout throughout."""
    plain = with_block(LARGE, mlp=DenseMLPConfig(ffn=96), norm=LayerNormConfig(), dropout=0.1)
    return replace(plain, learned_positions=True, tied=True, norm=LayerNormConfig())


def rounded(recipe: Any, **changes: Any) -> dict[str, Any]:
    """Experts whose products are rounded."""
    mixture = MoEConfig(experts=4, expert=GatedMLPConfig(ffn=64))
    return {"model": with_block(WIDE, mlp=mixture), "precision": PrecisionConfig(matmul=recipe), **changes}


ROUTED = MoEConfig(
    experts=4, expert=GatedMLPConfig(ffn=32), router=RouterConfig(z_loss=1e-3, row_loss=1e-2, balance_rate=0.01)
)
DELAYED = Fp8DelayedConfig(history=2, algorithm="max")
SCALE = DynamicScaleConfig(initial=2.0**28, window=2)
QUANTIZED = QuantizationConfig(weights="nf4", group=4, double=True)
PLAIN = model(dropout=0.0)

OPTAX = Path(__file__).with_name("test_optax_run.py")
"""A file with optimizers."""


def optax_run(make: str, **settings: Any) -> dict[str, Any]:
    """A run with a transformation of optax."""
    return {"model": model(repeats=3), "optimizer": OptaxConfig(make=make, **settings)}


STATES: dict[str, dict[str, Any]] = {
    "dropout": {},
    "four layers": {"model": model(repeats=4)},
    "tied weights and biases": {"model": gpt()},
    "experts": {"model": replace(with_block(LARGE, mlp=ROUTED), recompute="selective")},
    "adafactor": optax_run("optax:adafactor", settings={"min_dim_size_to_factor": 4}, weight_decay=0.1),
    "muon": optax_run(f"{OPTAX}:muon", offload=0.5),
    "a user's optimizer": {
        **optax_run(f"{OPTAX}:normed_momentum", trainable=("*.mixer.*", "*gain", "head")),
        "model": replace(model(repeats=3), recompute="full"),
    },
    "frozen weights": {"optimizer": AdamWConfig(trainable=("*.mixer.query", "norm.gain"))},
    "observed magnitudes": rounded(DELAYED),
    "stochastic rounding": rounded(Nvfp4Config(first_layers=0, last_layers=0)),
    "further heads": rounded(DELAYED, model=replace(WIDE, prediction=PredictionConfig())),
    "loss scale": {"model": PLAIN, "precision": PrecisionConfig(compute="float16", loss_scale=SCALE)},
    "adapters": {"model": replace(PLAIN, lora=LoRAConfig(rank=2, alpha=4.0, dropout=0.2))},
    "adapters of quantized weights": {
        "model": replace(PLAIN, lora=LoRAConfig(rank=2, alpha=4.0), quantization=QUANTIZED)
    },
    "adapters of rounded experts": rounded(
        DELAYED, model=replace(rounded(DELAYED)["model"], lora=LoRAConfig(rank=4, alpha=8.0))
    ),
}
"""Settings of a run with something that a checkpoint must keep."""
BASES = {
    "adapters": PLAIN,
    "adapters of quantized weights": PLAIN,
    "adapters of rounded experts": rounded(DELAYED)["model"],
}
"""The model whose weights a run of this state starts from."""


class Attempts:
    """The attempts of one run."""

    def __init__(self, cfg: RunConfig, layouts: tuple[ParallelConfig, ...], patch: pytest.MonkeyPatch):
        self.cfg, self.layouts, self.patch = cfg, layouts, patch

    @property
    def folder(self) -> Path:
        return Path(self.cfg.run_dir)

    def run(self, place: int, **changes: Any) -> int:
        """The attempt at this place -> its exit code."""
        return train(self.cfg.but(parallel=self.layouts[place], **changes))


def after_steps(run: Attempts) -> None:
    """Each attempt is as long as the others and saves where it ends."""
    share = STEPS // len(run.layouts)
    for place in range(len(run.layouts)):
        assert run.run(place, resilience=ResilienceConfig(exit_after_steps=share)) == 0
    committed = [event["step"] for event in events(run.folder, "save_committed")]
    assert {*range(share, STEPS + 1, share)} <= {*committed}


def at_its_time_limit(run: Attempts) -> None:
    assert run.run(0, resilience=ResilienceConfig(exit_after_minutes=1e-6)) == 0
    (stopped,) = events(run.folder, "stopped")
    assert (stopped["reason"], stopped["saved"]) == ("resilience.exit_after_minutes=1e-06", 1)
    assert run.run(1, resilience=ResilienceConfig(exit_after_minutes=60.0)) == 0


def by_a_signal(run: Attempts) -> None:
    """A scheduler that preempts the run sends it after step 4."""

    def record(run: Run, info: StepInfo, *rest: Any, **more: Any) -> StepRecord:
        if info.step == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return step_record(run, info, *rest, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megajax.job.steps.step_record", record)
        assert run.run(0) == 0
    (line,) = events(run.folder, "signal")
    assert (line["signal"], line["process"]) == ("SIGTERM", 0) and "exit_code" not in line
    (stopped,) = events(run.folder, "stopped")
    assert stopped["reason"] == "SIGTERM" and stopped["step"] == stopped["saved"] in (4, 5)
    (attempt,) = attempts(read_history(run.folder))
    assert attempt.ending.startswith("stopped (SIGTERM), step ") and attempt.exit_code == 0
    assert run.run(1) == 0


def by_a_crash(run: Attempts) -> None:
    """Nothing is saved at the end: steps 4 and 5 are repeated."""
    with pytest.raises(DrillFault):
        run.run(0, resilience=ResilienceConfig(inject=("crash:step=6",)))
    assert saved(run.folder) == [3] and run.run(1) == 0
    assert events(run.folder, "start")[-1]["step"] == 3


def by_a_numeric_fault(run: Attempts) -> None:
    assert run.run(0, resilience=ResilienceConfig(inject=("nan:step=5:always",))) == 17
    assert run.run(1) == 0


def with_a_damaged_checkpoint(run: Attempts) -> None:
    """The newest one is set aside, and the run goes on from the one before."""
    assert run.run(0, resilience=ResilienceConfig(exit_after_steps=5)) == 0
    assert saved(run.folder) == [3, 5]
    damage(run.folder / "checkpoints/00000005/meta.json")
    assert run.run(1) == 0
    (fallback,) = events(run.folder, "checkpoint_fallback")
    assert (fallback["from_step"], fallback["to_step"]) == (5, 3)


def with_copies_on_the_machine(run: Attempts) -> None:
    """They are newer than the shared checkpoint when the run crashes."""
    local = LocalConfig(every=2, folder=run.folder.parent / "node")
    run.cfg = run.cfg.but(checkpoint=replace(run.cfg.checkpoint, local=local))
    with pytest.raises(DrillFault):
        run.run(0, resilience=ResilienceConfig(inject=("crash:step=6",)))
    assert run.run(1) == 0
    (source,) = events(run.folder, "start_source")
    assert (source["step"], source["kind"]) == (4, "local")


def in_an_object_store(kind: str) -> Callable[[Attempts], None]:
    """Whose checkpoints are nowhere else."""

    def stop(run: Attempts) -> None:
        pytest.importorskip("moto")
        with serving(kind, run.folder.parent / "cache") as bucket:
            run.cfg = run.cfg.but(checkpoint=replace(run.cfg.checkpoint, store=f"{bucket}/run"))
            after_steps(run)
            assert not saved(run.folder)

    return stop


def with_fewer_devices(run: Attempts) -> None:
    """Two are lost, and come back: the layout is fitted to those that are present."""
    run.cfg = run.cfg.but(checkpoint=CheckpointConfig(every=None))
    for place, count in enumerate((8, 6, 8)):
        for module in ("megajax.job.job", "megajax.training.resolved"):
            run.patch.setattr(f"{module}.find_devices", lambda count=count: jax.devices()[:count])
        run.layouts = (replace(run.layouts[0], elastic=True),) * 3
        assert run.run(place, resilience=ResilienceConfig(exit_after_steps=2)) == 0
    assert [event["devices"] for event in events(run.folder, "start")] == [8, 6, 8]
    replans = events(run.folder, "replan")
    assert [(event["wanted"], event["devices"], event["used"]) for event in replans] == [(8, 6, 6)]


FAULTS: dict[str, Callable[[Attempts], None]] = {
    "stopped": after_steps,
    "time limit": at_its_time_limit,
    "SIGTERM": by_a_signal,
    "crash": by_a_crash,
    "numeric fault": by_a_numeric_fault,
    "damaged checkpoint": with_a_damaged_checkpoint,
    "local copies": with_copies_on_the_machine,
    "s3": in_an_object_store("s3"),
    "gs": in_an_object_store("gs"),
    "fewer devices": with_fewer_devices,
}
"""What happens to a run until it is done."""

TWO_STAGES = ParallelConfig(data=2, pipeline=2, data_sharding="zero1")
LAYOUTS: dict[str, tuple[ParallelConfig, ...]] = {
    "one device": (ONE, ONE),
    "zero1": (ParallelConfig(data=2, data_sharding="zero1"),) * 2,
    "fsdp": (ParallelConfig(data=2, data_sharding="fsdp"),) * 2,
    "to a pipeline": (ONE, ParallelConfig(data=2, pipeline=2)),
    "to an uneven pipeline": (ONE, replace(TWO_STAGES, layers=(1, 2))),
    "from an uneven pipeline": (replace(TWO_STAGES, layers=(1, 2)), ONE),
    "copied heads to one": (ParallelConfig(tensor=4, data=2, data_sharding="zero1"), ONE),
    "ring to exchange": (
        ParallelConfig(context=4, context_strategy="ring", data=1),
        ParallelConfig(context=2, context_strategy="all_to_all", data=2),
    ),
    "data and stages": (ParallelConfig(data=4, pipeline=2),),
}
"""What each attempt runs on."""


class Case(NamedTuple):
    """A run that is interrupted."""

    state: str = "dropout"
    fault: str = "stopped"
    layout: str = "one device"
    rows: int = 8

    @property
    def name(self) -> str:
        return "-".join(part for part, usual in zip(self[:3], Case()[:3], strict=True) if part != usual) or "plain"


FAST = [Case()]
"""Every state, every end and every layout is in a case."""
SLOW = [
    Case("experts", "crash", "zero1"),
    Case("adafactor", layout="from an uneven pipeline"),
    Case("muon", layout="to an uneven pipeline"),
    Case("a user's optimizer", "s3", "fsdp"),
    Case("frozen weights", layout="to a pipeline"),
    Case("observed magnitudes", "local copies"),
    Case("stochastic rounding"),
    Case("further heads", "time limit"),
    Case("loss scale", "SIGTERM", "zero1"),
    Case("adapters", "numeric fault"),
    Case("adapters of quantized weights", "damaged checkpoint"),
    Case("adapters of rounded experts"),
    Case(fault="gs"),
    Case("four layers", layout="copied heads to one"),
    Case("four layers", layout="ring to exchange"),
    Case("tied weights and biases", "fewer devices", "data and stages", rows=24),
]
CASES = {case.name: case for case in (*FAST, *SLOW)}


@pytest.fixture(scope="module")
def run_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., RunConfig]:
    """run_of(folder, case) -> its config; the base that it starts from has been trained."""
    bases: dict[str, Path] = {}

    def config(folder: Path, case: Case) -> RunConfig:
        checkpoint = CheckpointConfig(every=3)
        if (base := BASES.get(case.state)) is not None:
            if case.state not in bases:
                bases[case.state] = tmp_path_factory.mktemp("base")
                settings = STATES[case.state] | {"model": base, "steps": 3}
                assert train(run_config(bases[case.state], **settings)) == 0
            checkpoint = replace(checkpoint, load=bases[case.state], parts="weights")
        settings = {
            "schedule": ScheduleConfig(lr=1e-2, warmup_steps=2, decay_steps=STEPS),
            "batch": BatchConfig(global_size=case.rows, micro_size=1 if case.rows > 8 else 2),
            "checkpoint": checkpoint,
            "steps": STEPS,
        }
        if case.state != "dropout":  # There is less to compile without an evaluation.
            settings["evaluation"] = EvaluationConfig(batches=0)
        return run_config(folder, **settings | STATES[case.state])

    return config


@pytest.fixture(scope="module")
def without_a_stop(
    tmp_path_factory: pytest.TempPathFactory, run_of: Callable[..., RunConfig]
) -> Callable[[Case], Path]:
    """The folder of the same run, on the last layout where all are alike and on one device otherwise."""
    folders: dict[tuple[Any, ...], Path] = {}

    def whole(case: Case) -> Path:
        layouts = LAYOUTS[case.layout]
        layout = layouts[-1] if len(set(layouts)) == 1 else ONE
        key = case.state, layout, case.rows
        if key not in folders:
            folders[key] = tmp_path_factory.mktemp("whole")
            assert train(run_of(folders[key], case).but(parallel=layout)) == 0
        return folders[key]

    return whole


def last_weights(folder: Path) -> dict[str, np.ndarray]:
    weights = open_stored(folder, Reading(trusted=True)).weights
    return {path: weights.read(path, tuple(slice(0, size) for size in shape)) for path, shape in weights.shapes.items()}


def evaluations(folder: Path) -> dict[str, float]:
    """Split -> loss of the last evaluation."""
    return {line["split"]: line["loss"] for line in lines(folder) if "split" in line}


def tolerance(case: Case) -> float:
    """0 where every number has to be the same."""
    if case.fault == "fewer devices":
        return 1e-4
    return 0.0 if len(set(LAYOUTS[case.layout])) == 1 else 1e-5


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(case.name, marks=pytest.mark.smoke if case == Case() else () if case in FAST else pytest.mark.slow)
        for case in CASES.values()
    ],
)
def test_a_run_that_was_interrupted_equals_one_without_a_stop(
    name: str, tmp_path: Path, run_of: Callable, without_a_stop: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]
    expected = without_a_stop(case)
    run = Attempts(run_of(tmp_path / "run", case), LAYOUTS[case.layout], monkeypatch)
    FAULTS[case.fault](run)
    monkeypatch.undo()
    actual_steps, expected_steps = timeless_steps(run.folder), timeless_steps(expected)
    assert list(actual_steps) == list(expected_steps) == [*range(1, STEPS + 1)]
    if (limit := tolerance(case)) == 0:
        assert actual_steps == expected_steps
        assert evaluations(run.folder) == evaluations(expected)
    for numbers in (actual_steps, expected_steps):
        assert all(np.isfinite(line["loss"]) for line in numbers.values()) or case.state == "loss scale"
    losses = [[line["loss"] for line in numbers.values()] for numbers in (actual_steps, expected_steps)]
    assert losses[0] == pytest.approx(losses[1], rel=limit, nan_ok=True) and len(set(losses[0])) > 2
    if limit == 0 and run.cfg.checkpoint.store is None:
        actual, wanted = last_weights(run.folder), last_weights(expected)
        assert actual.keys() == wanted.keys()
        for path, values in wanted.items():
            np.testing.assert_array_equal(actual[path], values, err_msg=path)
