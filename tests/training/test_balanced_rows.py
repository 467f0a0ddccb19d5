"""Rows balanced over data groups: the same losses on every layout and after a resume; refusals and messages."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from small_jobs import VOCABULARY, model, run_config

from megajax.config.compose import check
from megajax.config.errors import ConfigError
from megajax.data.rows.balancing import RowWork
from megajax.data.rows.config import LoaderConfig
from megajax.data.text.config import BlendConfig, MockConfig
from megajax.data.text.indexed_dataset import IndexedWriter
from megajax.job.banner import banner
from megajax.job.description import describe
from megajax.job.notebook import set_up
from megajax.job.start.resume import facts
from megajax.layers.attention.config import AttentionConfig
from megajax.layers.block.config import BlockConfig
from megajax.layers.mlp.config import GatedMLPConfig
from megajax.layers.moe.config import CapacityConfig, DispatchConfig, MoEConfig, RouterConfig
from megajax.layers.multiply_adds import VisibleKeys
from megajax.mesh.config import ParallelConfig
from megajax.models.decoder.config import PredictionConfig
from megajax.models.facts import count_flops, summarize
from megajax.training.check_row_balance import balance_problems
from megajax.training.config import BatchConfig, EvaluationConfig
from megajax.training.run_config import RunConfig
from megajax.training.session import Run, row_work


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Short documents of uneven length."""
    draw, prefix = np.random.default_rng(0), tmp_path_factory.mktemp("text") / "text"
    with IndexedWriter(prefix, np.dtype(np.uint16)) as writer:
        for length in draw.lognormal(1.8, 1, 600).astype(int).clip(1, 40).tolist():
            writer.add_document([draw.integers(0, VOCABULARY - 4, length)])
    return prefix


def config(text: Path, balance: str, **changes: Any) -> RunConfig:
    loader, files = LoaderConfig(balance=balance), {"paths": (str(text),), "split": "1", "cache_dir": f"{text}-cache"}
    data = BlendConfig(**files, isolate_documents=True, loader=loader)
    batch, small = BatchConfig(global_size=16, micro_size=2), model(repeats=1)
    settings = {"model": small, "data": data, "batch": batch, "evaluation": EvaluationConfig(batches=0), "steps": 4}
    return run_config(text.parent / "run", **settings | changes)


def under(run: Run, text: Path, balance: str, **start: Any) -> Run:
    """The same program with another balancing of rows."""
    cfg = replace(run.cfg, data=config(text, balance).data)
    parts = replace(run.parts, resolved=replace(run.parts.resolved, cfg=cfg))
    state = start.get("state") or run.program.fresh_state()()
    return Run(parts, state, parts.loader(parts.splits.train, int(state.consumed_samples), training=True))


def losses(run: Run, count: int) -> list[float]:
    losses = [info.loss for info in run.steps(count)]
    run.close()
    return losses


def compared(text: Path, parallel: ParallelConfig) -> None:
    """Losses are the same with and without balancing, also if a resumed run changes it."""
    batch, devices = BatchConfig(global_size=16, micro_size=2), jax.devices()[: parallel.data * parallel.context]
    small = model(repeats=1, recompute="selective" if parallel.data_sharding == "fsdp" else "none")
    run = set_up(config(text, "step", parallel=parallel, batch=batch, model=small), devices=devices)
    in_order, balanced = run.batches.imbalance()
    assert balanced.step < in_order.step
    with jax.set_mesh(run.mesh):
        plain = losses(under(run, text, "none"), 4)
        assert losses(run, 4) == pytest.approx(plain, rel=1e-5)
        first = under(run, text, "microbatch")
        first_losses = losses(first, 2)
        resumed = under(run, text, "step", state=first.state)
        assert resumed.batches.consumed == 32
        assert first_losses + losses(resumed, 2) == pytest.approx(plain, rel=1e-5)
    assert run.train_step._cache_size() == 1, "one program"


def test_two_data_groups_have_the_same_losses(text: Path) -> None:
    compared(text, ParallelConfig(data=2))


@pytest.mark.slow
def test_a_context_has_the_same_losses(text: Path) -> None:
    compared(text, ParallelConfig(data=2, context=2, context_rounds=2, data_sharding="fsdp"))


def test_the_banner_reports_balanced_rows(text: Path) -> None:
    cfg = config(text, "step", parallel=ParallelConfig(data=4), batch=BatchConfig(global_size=16, micro_size=1))
    run = set_up(cfg, devices=jax.devices()[:4])
    lines = {name: text for _, rows in banner(run, describe(run.parts), "") for name, text in rows}
    assert lines["balanced rows"].startswith("by step; busiest group over mean at the next step: step 1.0")
    rows = np.ravel(next(run.batches)[0]["sample"]).tolist()
    run.close()
    assert rows != sorted(rows) == list(range(16)), "the run reads them so"
    in_order = under(run, text, "none", state=run.state)
    assert "balanced rows" not in {
        name for _, rows in banner(in_order, describe(in_order.parts), "") for name, _ in rows
    }
    assert facts(run.parts) == facts(under(run, text, "none", state=run.state).parts), "a run may go on with the other"


def experts(**router: Any) -> MoEConfig:
    return MoEConfig(experts=4, top_k=2, expert=GatedMLPConfig(ffn=8), router=RouterConfig(**router))


REFUSED = {
    "whole rows": ({"data": {"isolate_documents": False}}, "each row is one document, so all rows have the same work"),
    "means": ({"batch": {"loss_average": "microbatches"}}, "loss_average=microbatches with batch.micro_size=2"),
    "experts": ({"mlp": experts(aux_loss=0.1)}, "changes the losses of model.stack.pattern.0.mlp.router.aux_loss"),
    "capacity": ({"mlp": experts(capacity=CapacityConfig(factor=1.0))}, "mlp.router.capacity, which compares"),
    "room": (
        {"mlp": replace(experts(), dispatch=DispatchConfig(room=1.5))},
        "changes the losses of model.stack.pattern.0.mlp.dispatch.room",
    ),
    "weights of further tokens": (
        {"prediction": PredictionConfig(reweighted="microbatches")},
        "prediction.reweighted=microbatches weighs tokens: batch.micro_size=2",
    ),
    "experts further ahead": (
        {"prediction": PredictionConfig(block=BlockConfig(mixer=AttentionConfig(heads=2), mlp=experts(aux_loss=0.1)))},
        "changes the losses of model.prediction.block.mlp.router.aux_loss",
    ),
}


def changed(text: Path, balance: str, changes: dict[str, Any]) -> RunConfig:
    cfg = config(text, balance)
    (block,) = cfg.model.stack.pattern
    block = replace(block, mlp=changes.get("mlp", block.mlp))
    small = replace(cfg.model, stack=replace(cfg.model.stack, pattern=(block,)), prediction=changes.get("prediction"))
    data, batch = (replace(getattr(cfg, name), **changes.get(name, {})) for name in ("data", "batch"))
    return cfg.but(model=small, data=data, batch=batch)


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_exclude_each_other(text: Path, name: str) -> None:
    changes, message = REFUSED[name]
    with pytest.raises(ConfigError, match=rf"data\.loader\.balance: .*{message}"):
        check(changed(text, "step", changes), 1)
    check(changed(text, "none", changes), 1)


def test_rows_without_causal_attention_are_refused(text: Path) -> None:
    encoder = SimpleNamespace(ignores_later_positions=lambda: False)
    (problem,) = balance_problems(config(text, "step").data, BatchConfig(), encoder)
    assert "reads later positions too" in problem.message


def test_settings_that_fit_together(text: Path) -> None:
    """Rows may move within a microbatch, because the loss is over its tokens; means of single rows do not change."""
    check(changed(text, "microbatch", REFUSED["experts"][0]), 1)
    check(changed(text, "step", {"mlp": experts(z_loss=0.1, row_loss=0.1, balance_rate=None)}), 1)
    check(changed(text, "step", {"batch": {"loss_average": "microbatches", "micro_size": 1}}), 1)
    check(changed(text, "step", REFUSED["weights of further tokens"][0] | {"batch": {"micro_size": 1}}), 1)


@pytest.mark.slow
def test_a_loss_over_the_rows_of_a_microbatch(text: Path) -> None:
    """The loss does not change while rows stay in their microbatch. With `step` it would; that is refused."""
    cfg = changed(text, "microbatch", {"mlp": experts(aux_loss=100.0)}).but(parallel=ParallelConfig(data=2), steps=6)
    run = set_up(cfg, devices=jax.devices()[:2])
    with jax.set_mesh(run.mesh):
        plain = losses(under(run, text, "none"), 6)
        assert losses(run, 6) == pytest.approx(plain, rel=1e-5)
        assert losses(under(run, text, "step"), 6) != pytest.approx(plain, rel=1e-4)


def test_work_of_rows_equals_that_of_the_throughput() -> None:
    """FLOPs of a row of one document, as MFU counts them."""
    small = model(sequence_length=64, repeats=2)
    work, flops = row_work(summarize(small)), count_flops(small)
    ((keys, each),) = work.per_score
    assert keys == VisibleKeys(causal=True) and work.of_row(np.array([64])) == pytest.approx(64 * flops.causal)
    (block,) = small.stack.pattern
    windowed = replace(block, mixer=replace(block.mixer, window=7))
    mixed = replace(small, stack=replace(small.stack, pattern=(block, windowed), repeats=1))
    work = RowWork(work.per_position, ((keys, each / 2), (VisibleKeys(True, window=7), each / 2)))
    assert row_work(summarize(mixed)) == work
    assert work.of_row(np.array([64])) == pytest.approx(64 * count_flops(mixed).causal)


def test_synthetic_data_can_be_balanced() -> None:
    check(run_config(data=MockConfig(documents=300, isolate_documents=True, loader=LoaderConfig(balance="step"))), 1)
