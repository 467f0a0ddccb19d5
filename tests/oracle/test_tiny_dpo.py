"""DPO of a tiny Llama, from a file of pairs to the last step, against a training loop in torch."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from megatron_cases import FURTHER

import megajax as mj
from megajax.job.job import train
from megajax.metrics.record import read_metrics

FOLDER = FURTHER / "preference"
CASES = sorted(FOLDER.glob("tiny_dpo_*"))


def lines(folder: Path) -> list[dict[str, str]]:
    """The pairs as texts of numbers, which the null tokenizer reads."""
    with np.load(folder / "io.npz") as file:
        ids, answers, real = (file[name] for name in ("input_ids", "completion_mask", "attention_mask"))
    rows, count = [], len(ids) // 2

    def text(row: int, answer: int) -> str:
        kept = (real[row] > 0) & (answers[row] == answer)
        return "".join(f"{token} " for token in ids[row][kept].tolist())

    for pair in range(count):
        assert text(pair, 0) == text(pair + count, 0)
        rows.append({"prompt": text(pair, 0), "chosen": text(pair, 1), "rejected": text(pair + count, 1)})
    return rows


@pytest.mark.skipif(not CASES, reason=f"no reference values at {FOLDER}")
@pytest.mark.parametrize("folder", CASES, ids=lambda folder: folder.name)
def test_losses_rewards_and_gradient_norms(folder: Path, tmp_path: Path) -> None:
    meta: dict[str, Any] = json.loads((folder / "meta.json").read_text())
    pairs, rows = lines(folder), meta["rows"]
    (tmp_path / "pairs.jsonl").write_text("".join(f"{json.dumps(pair)}\n" for pair in pairs))
    assert meta["loss"] == "sigmoid" and meta["clip"] is None
    model = replace(mj.model_of(str(folder)), sequence_length=64)
    cfg = mj.RunConfig(
        model=mj.with_objective(model, mj.DPOConfig(beta=meta["beta"])),
        parallel=mj.ParallelConfig(data=1),
        precision=mj.PrecisionConfig(compute="float32"),
        data=mj.PreferencesConfig(
            train_paths=(str(tmp_path / "pairs.jsonl"),),
            packing="lines",
            end_token="template",
            cache_dir=str(tmp_path / "cache"),
        ),
        tokenizer=mj.NullTokenizerConfig(vocabulary_size=model.vocabulary_size),
        optimizer=mj.AdamWConfig(
            beta1=meta["betas"][0], beta2=meta["betas"][1], epsilon=meta["eps"], weight_decay=meta["wd"], clip=None
        ),
        schedule=mj.ScheduleConfig(lr=meta["lr"], min_lr=meta["lr"], style="constant"),
        batch=mj.BatchConfig(global_size=len(pairs), micro_size=len(pairs)),
        evaluation=mj.EvaluationConfig(every=None, batches=0),
        checkpoint=mj.CheckpointConfig(load=Path(f"hf:{folder}"), every=None),
        logging=mj.LoggingConfig(plot=False, sample=False, report=False, live="never"),
        steps=len(rows),
        run_dir=str(tmp_path / "run"),
    )
    assert train(cfg) == 0
    steps, _ = read_metrics(tmp_path / "run" / "metrics.jsonl")
    names = {"loss": "loss", "grad_norm": "grad_norm_before_clip", "margin": "margin"}
    names |= {"reward_chosen": "reward_chosen", "reward_rejected": "reward_rejected"}
    names |= {"log_p_chosen": "logps_chosen", "log_p_rejected": "logps_rejected"}
    for ours, theirs in names.items():
        actual, expected = ([line[name] for line in table] for table, name in ((steps, ours), (rows, theirs)))
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4, err_msg=ours)
    np.testing.assert_allclose(steps[0]["loss"], np.log(2), rtol=1e-6)
    # In the first step, the margins are rounding errors.
    assert [line["accuracy"] for line in steps[1:]] == [row["accuracy"] for row in rows[1:]]
