"""The real training step against Megatron-LM's: loss, gradient norm, rates and weights of every run in the folder."""

import re
from typing import Any

import numpy as np
import pytest
from megatron_cases import Comparison, cases, load_arrays, load_json, unsupported
from megatron_config import decoder_config, optimizer_config, schedule_config
from megatron_run import OneDevice, batch_by_rule, lm_batch
from megatron_weights import Arrays, stats, strided, tensors, to_megatron, to_ours, weight_by_rule

from megajax.optim.groups import ParameterGroup

TOLERANCE = 1e-4
VOCABULARY = 128

RUNS = load_json("numerics/train_runs.json")


def first_seed(run: dict[str, Any]) -> int:
    """Seed of the first microbatch; the others follow consecutively."""
    matches = re.search(r"seed=(\d+)\+t\*micro\+i", run["batch_rule"])
    return int(matches[1]) if matches else unsupported(f"batch rule {run['batch_rule']}")


def run_model(run: dict[str, Any]) -> OneDevice:
    config, model = run["config"]["config"], run["config"]["model"]
    vocabulary = model.get("vocab_size") or VOCABULARY
    positions = model.get("max_sequence_length") or run["S"]
    latent = bool(run["config"].get("mla") or run.get("mla"))
    return OneDevice(decoder_config(config, model, vocabulary=vocabulary, positions=positions, latent=latent))


def check_groups(compare: Comparison, run: dict[str, Any], model: OneDevice, groups: dict[str, ParameterGroup]) -> None:
    """Which weights decay, and the highest and lowest rate of each."""
    highest, lowest = (run["scheduler"][name] for name in ("max_lr", "min_lr"))
    rates = {
        path: (
            highest * group.width if group.lr is None else group.lr,
            lowest * group.width if group.min_lr is None else group.min_lr,
            group.decay,
        )
        for path, group in groups.items()
    }
    table, seen = tensors(model.cfg), set()
    for group in run["groups"]:
        theirs = (group["max_lr"], group["min_lr"], group["wd_mult"])
        for name in group["names"]:
            ours = {rates[piece.path] for piece in table[name].pieces}
            compare.require("groups", ours == {theirs}, f"{name}: (lr, min_lr, decay) {theirs}, ours {ours}")
        seen |= set(group["names"])
    compare.require("groups", seen == set(table), f"other weights: {sorted(seen ^ set(table))}")


def determined(model: OneDevice) -> dict[str, np.ndarray]:
    """Their name -> bool array, False where the loss does not depend on the weight.

    The gradient of such a weight is rounding noise (1e-9 here), which Adam divides by epsilon: where it goes means
    nothing.
    """
    masks = {path: np.ones(spec.shape, bool) for path, spec in model.declared.items()}
    masks |= {path: ~places for path, places in model.undetermined().items()}
    return to_megatron(model.cfg, masks)


def check_params(compare: Comparison, stored: Arrays, step: int, params: Arrays, meaningful: Arrays) -> None:
    """Norms and sums only of arrays that are meaningful as a whole."""
    rows = zip(
        params,
        strided(params),
        strided(meaningful),
        stats(params),
        stored[f"step{step}/param_strided"],
        stored[f"step{step}/param_stats"],
        strict=True,
    )
    for name, values, used, (norm, total, largest), their_values, (their_norm, their_total, their_largest) in rows:
        at = f"{name} after step {step}"
        compare.check("weights", values * used, their_values * used, TOLERANCE, name=at, scale=their_largest)
        if meaningful[name].all():
            compare.check("weight norm", norm, their_norm, TOLERANCE, name=at)
            compare.check("weight sum", total, their_total, TOLERANCE, name=at, scale=their_norm)
            compare.check("weight maximum", largest, their_largest, TOLERANCE, name=at)


def check_meaningless(compare: Comparison, run: dict[str, Any], moved: Arrays, meaningful: Arrays) -> None:
    """Noise moves a weight far less than a gradient would: by the sum of learning rates.

    As far, where a step follows the sign alone; and it may in biases of norms, whose noise is near Adam's epsilon.
    """
    far = sum(row["lr_used"] for row in run["rows"])
    for name, used in meaningful.items():
        if not used.all():
            most = 1.01 if run["optimizer"].get("optimizer") == "lion" or "layernorm" in name else 0.1
            compare.check("noise", moved[name][~used], np.zeros((~used).sum()), most, name=name, scale=far)


def marked(case: Any) -> Any:
    return pytest.param(case, marks=pytest.mark.slow) if case == "llama" else case


@pytest.mark.parametrize("case", [*map(marked, cases(RUNS))])
def test_run(case: str) -> None:
    run, stored = RUNS[case], load_arrays(f"numerics/train_{case}.npz")
    schedule = schedule_config(run["scheduler"])
    optimizer = optimizer_config(run["optimizer"], run["scheduler"]["end_wd"])
    model, seed, micro = run_model(run), first_seed(run), run["micro"]
    weights = {name: weight_by_rule(name, w.shape) for name, w in to_megatron(model.cfg, model.zeros()).items()}
    rows = run["rows"]
    trainer = model.trainer(
        to_ours(model.cfg, weights),
        optimizer,
        schedule,
        steps=len(rows),
        rows=micro * run["mbs"],
        microbatches=micro,
        average="tokens" if run["config"]["config"].get("calculate_per_token_loss") else "microbatches",
    )
    compare, meaningful = Comparison(case), determined(model)
    check_groups(compare, run, model, trainer.optimizer.groups)
    for t, row in enumerate(rows):
        batches = [
            batch_by_rule(seed + t * micro + i, run["mbs"], run["S"], model.cfg.vocabulary_size) for i in range(micro)
        ]
        counted = [float(mask.sum()) for _, _, mask in batches]
        assert counted == [count for _, count in row["per_micro"]], "the batch rule gives other rows"
        actual, at = trainer.step(lm_batch(batches)), f"in step {row['iteration']}"
        compare.check("loss", actual["loss"], row["reported_loss"], TOLERANCE, name=at)
        compare.check("gradient norm", actual["grad_norm"], row["grad_norm"], TOLERANCE, name=at)
        compare.check("lr", actual["lr"], row["lr_used"], TOLERANCE, name=at)
        now = float(trainer.schedule.weight_decay(np.int32(t * micro * run["mbs"]), optimizer.weight_decay))
        decay = [now * group["wd_mult"] for group in run["groups"]]
        compare.check("weight decay", decay, row["wd_used"], TOLERANCE, name=at)
        compare.require("skipped", actual["skipped"] == (not row["ok"]), f"{bool(actual['skipped'])} {at}")
        if f"step{row['iteration']}/param_strided" in stored:
            now = to_megatron(model.cfg, trainer.params())
            check_params(compare, stored, row["iteration"], now, meaningful)
    now = to_megatron(model.cfg, trainer.params())
    check_meaningless(compare, run, {name: now[name] - weights[name] for name in now}, meaningful)
    compare.finish()
