"""Losses of preferences and policies against TRL's values and gradients, through sums over answers in rows."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from megatron_cases import FURTHER

from megajax.kernels.cross_entropy import Objective, VocabularyShard, loss_and_gradients, token_scores
from megajax.models.answers.advantages import group_advantages
from megajax.models.answers.config import DPOConfig, GRPOConfig, KTOConfig, ORPOConfig, SimPOConfig
from megajax.models.answers.objectives import TokenObjective
from megajax.models.answers.policy import entropies
from megajax.models.answers.preference_losses import kto, odds_ratio, simpo

FOLDER = FURTHER
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason=f"no reference values at {FOLDER}")


def read(name: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The settings and the arrays of a file."""
    settings, arrays = FOLDER / f"{name}.json", FOLDER / f"{name}.npz"
    loaded = dict(np.load(arrays, allow_pickle=False)) if arrays.exists() else {}
    return json.loads(settings.read_text()) if settings.exists() else {}, loaded


def close(actual: Any, expected: Any, name: str) -> None:
    np.testing.assert_allclose(np.asarray(actual), expected, rtol=1e-5, atol=1e-6, err_msg=name)


def pair_row(values: np.ndarray) -> jax.Array:
    """[2 P, T], chosen answers first -> one row with pairs one after the other [1, 2 P T]."""
    chosen, rejected = np.split(values, 2)
    return jnp.asarray(np.stack([chosen, rejected], axis=1).reshape(1, -1))


def from_pair_row(row: Any, like: np.ndarray) -> np.ndarray:
    """The inverse of `pair_row`."""
    pairs = np.asarray(row).reshape(len(like) // 2, 2, -1)
    return np.concatenate([pairs[:, 0], pairs[:, 1]])


def pair_batch(mask: np.ndarray, reference: np.ndarray) -> dict[str, jax.Array]:
    """The leaves of a row with all pairs."""
    answers, tokens = mask.shape
    numbers = pair_row(np.arange(1, answers + 1)[:, None] * np.ones((1, tokens), np.int32))
    # `pair_row` has brought the answers into their order in the row.
    numbers = jnp.repeat(jnp.arange(1, answers + 1, dtype=jnp.int32), tokens)[None] + 0 * numbers.astype(jnp.int32)
    return {
        "loss_mask": pair_row(mask.astype(np.float32)),
        "pairs": numbers,
        "positions": jnp.tile(jnp.arange(tokens, dtype=jnp.int32), answers)[None],
        "reference": pair_row(reference),
    }


def config_of(case: str, settings: dict[str, Any]) -> DPOConfig:
    """Our settings for a case. TRL ignores label_smoothing with the sigmoid loss."""
    kinds, options = settings["loss_type"], {"beta": settings["beta"]}
    if isinstance(kinds, list):
        assert kinds == ["sigmoid", "sft"] and settings["loss_weights"][0] == 1
        kinds = "sigmoid"
    options["loss"] = "sigmoid" if case.startswith("formula_cdpo") else kinds
    if case.startswith("formula_cdpo") or kinds in ("robust", "exo_pair"):
        options["label_smoothing"] = settings["label_smoothing"]
    options["length_weight"] = settings.get("ld_alpha") or 1.0
    options["divergence"] = settings.get("f_divergence_type", "reverse_kl")
    config = DPOConfig(**options)
    assert not config.problems()
    return config


DPO_CASES = read("preference/dpo")[0]


@pytest.mark.parametrize("case", DPO_CASES)
def test_dpo(case: str) -> None:
    settings, (_, arrays) = DPO_CASES[case], read("preference/dpo")
    mask, policy = arrays["mask"], arrays["policy_token_logps"]
    objective, batch = config_of(case, settings).build(), pair_batch(mask, arrays["ref_token_logps"])
    sft = settings.get("loss_weights", [1, 0])[1]

    def loss(row: jax.Array) -> tuple[jax.Array, Any]:
        terms = objective(row, batch)
        chosen = pair_row(np.repeat([1.0, 0.0], len(mask) // 2)[:, None] * mask)  # TRL: mean over all chosen tokens
        return terms.loss / terms.weight - sft * jnp.sum(row * chosen) / jnp.sum(chosen), terms.metrics

    (value, metrics), gradient = jax.value_and_grad(loss, has_aux=True)(pair_row(policy))
    close(value, arrays[f"{case}/loss"], case)
    close(from_pair_row(gradient, policy), arrays[f"{case}/grad"], case)
    names = {"rewards/chosen": "reward_chosen", "rewards/rejected": "reward_rejected", "rewards/margins": "margin"}
    names |= {"rewards/accuracies": "accuracy", "logps/chosen": "log_p_chosen", "logps/rejected": "log_p_rejected"}
    for theirs, expected in settings.get("metrics", {}).items():
        total, count = metrics[names[theirs]]
        close(total / count, np.float32(expected), f"{case} {theirs}")


def test_losses_without_a_reference() -> None:
    settings, arrays = read("preference/reference_free")
    chosen, rejected = jnp.asarray(arrays["mean_chosen"]), jnp.asarray(arrays["mean_rejected"])
    weight = settings["orpo_beta0.1"]["beta"]
    both = jax.value_and_grad(lambda c, r: weight * odds_ratio(c, r).mean(), (0, 1))
    value, gradients = both(chosen, rejected)
    close(value, arrays["orpo_beta0.1/odds_term"], "orpo")
    for gradient, side in zip(gradients, ("chosen", "rejected"), strict=True):
        close(gradient, arrays[f"orpo_beta0.1/grad_{side}"], f"orpo {side}")
    cases = {
        "simpo": (settings["simpo"]["gamma"], 1, 1),
        "cpo": (0.0, arrays["len_chosen"].astype(np.float32), arrays["len_rejected"].astype(np.float32)),
    }
    for case, (gamma, *lengths) in cases.items():
        beta = settings[case]["beta"]
        inputs = chosen * lengths[0], rejected * lengths[1]
        # TRL's gamma is the margin times beta, so beta (d - gamma / beta).
        losses = simpo(*inputs, beta, gamma, 0.0)
        close(losses, arrays[f"{case}/losses"], case)
        gradients = jax.grad(lambda c, r, beta=beta, gamma=gamma: simpo(c, r, beta, gamma, 0.0).mean(), (0, 1))(*inputs)
        for gradient, side in zip(gradients, ("chosen", "rejected"), strict=True):
            close(gradient, arrays[f"{case}/grad_{side}"], f"{case} {side}")


@pytest.mark.parametrize("config", [ORPOConfig(weight=0.3), SimPOConfig(beta=1.5, gamma=0.7, label_smoothing=0.1)])
def test_losses_without_a_reference_in_rows(config: ORPOConfig | SimPOConfig) -> None:
    """The same as the formulas on means over the tokens of each answer."""
    _, arrays = read("preference/dpo")
    mask, policy = arrays["mask"].astype(np.float32), arrays["policy_token_logps"]
    batch = pair_batch(mask, np.zeros_like(policy))

    def plain(values: jax.Array) -> jax.Array:
        means = (values * mask).sum(1) / mask.sum(1)
        chosen, rejected = jnp.split(means, 2)
        if isinstance(config, ORPOConfig):
            return (config.weight * odds_ratio(chosen, rejected) - chosen).mean()
        return simpo(chosen, rejected, config.beta, config.gamma, config.label_smoothing).mean()

    def packed(row: jax.Array) -> jax.Array:
        terms = config.build()(row, batch)
        return terms.loss / terms.weight

    value, gradient = jax.value_and_grad(packed)(pair_row(policy))
    expected, expected_gradient = jax.value_and_grad(plain)(jnp.asarray(policy))
    close(value, expected, "loss")
    close(from_pair_row(gradient, policy), expected_gradient, "gradient")


@pytest.mark.parametrize("case", [case for case in read("preference/kto")[0] if case.startswith("kto")])
def test_kto(case: str) -> None:
    """One group of answers a row; the answers to other prompts have one token each, with the given sum."""
    settings, arrays = read("preference/kto")
    mask, policy = arrays["mask"].astype(np.float32), arrays["policy_token_logps"]
    others = arrays["kl_ref_logps_neg" if "neg" in case else "kl_ref_logps_pos"]
    good = arrays["label"]
    numbers = np.concatenate([np.where(good, 1, 2)[:, None] * mask, np.full((len(mask), 1), 3)], axis=1)
    batch = {
        "loss_mask": jnp.asarray((numbers > 0).astype(np.float32)),
        "judged": jnp.asarray(numbers.astype(np.int32)),
        "reference": jnp.concatenate([arrays["ref_token_logps"], others[:, None]], axis=1),
    }
    objective = KTOConfig(beta=settings[case]["beta"]).build()

    def loss(values: jax.Array) -> tuple[jax.Array, Any]:
        terms = objective(jnp.concatenate([values, arrays["kl_policy_logps"][:, None]], axis=1), batch)
        return terms.loss / terms.weight, terms.metrics

    (value, metrics), gradient = jax.value_and_grad(loss, has_aux=True)(jnp.asarray(policy))
    close(value, arrays[f"{case}/loss"], case)
    close(gradient, arrays[f"{case}/grad"], case)
    for theirs, ours in {"rewards/chosen": "reward_chosen", "rewards/rejected": "reward_rejected", "kl": "kl"}.items():
        close(metrics[ours][0] / metrics[ours][1], np.float32(settings[case]["metrics"][theirs]), theirs)


def test_kto_with_a_baseline_of_zero_is_apo_zero_of_single_answers() -> None:
    ratios = jnp.array([0.3, -2.0])
    losses = kto(ratios, jnp.array([True, False]), 0.0, 0.5)
    close(losses, [1 - 1 / (1 + np.exp(-0.15)), 1 / (1 + np.exp(1.0))], "losses")


POLICY_CASES = read("rl/policy_losses")[0]


@pytest.mark.parametrize("case", POLICY_CASES)
def test_policy_loss(case: str) -> None:
    """The weights of tokens in one pass of the head are the objective's gradient."""
    settings, (_, arrays) = POLICY_CASES[case], read("rl/policy_losses")
    mask, policy = arrays["mask"].astype(np.float32), jnp.asarray(arrays["policy_logps"])
    batch = {
        "loss_mask": jnp.asarray(mask),
        "answers": jnp.asarray(mask.astype(np.int32)),
        "advantage": jnp.asarray(np.repeat(arrays["advantages"][:, None], mask.shape[1], axis=1)),
        "old_log_p": policy if settings.get("on_policy") else jnp.asarray(arrays["old_logps"]),
        "reference": jnp.asarray(arrays["ref_logps"]),
    }
    kind, level = settings["loss_type"], settings.get("level", "token")
    average = {"grpo": "answers", "dr_grpo": "length"}.get(kind, "tokens")
    objective = GRPOConfig(
        loss="cispo" if kind == "cispo" else "clipped",
        ratio=level,
        clip_low=settings.get("epsilon_low", 0.2),
        clip_high=settings.get("epsilon_high", 0.2),
        average=average,
        length=settings.get("max_completion_length", 1) if average == "length" else 1,
        kl_weight=settings.get("beta", 0.0),
    ).build()

    def loss(log_p: jax.Array) -> tuple[jax.Array, Any]:
        terms = objective(log_p, batch)
        return terms.loss / terms.weight, terms

    (value, terms), gradient = jax.value_and_grad(loss, has_aux=True)(policy)
    close(value, arrays[f"{case}/loss"], case)
    close(gradient, arrays[f"{case}/grad"], case)
    if isinstance(objective, TokenObjective):
        weights = objective.weigh(policy.reshape(-1), objective.facts(batch).reshape(mask.size, -1))
        close(-weights.reshape(mask.shape) / objective.weight(batch), arrays[f"{case}/grad"], case)
    theirs, tokens = settings["metrics"], mask.sum()
    names = {"clip_ratio/low_mean": "clip_low", "clip_ratio/high_mean": "clip_high", "cispo_clip_ratio": "clip_high"}
    for name, ours in (names | {"kl": "kl"}).items():
        if name in theirs and ours in terms.metrics and level == "token":
            total, count = terms.metrics[ours]
            close(total / count, np.float32(theirs[name]), name)
    close((entropies(arrays["logits"]) * mask).sum() / tokens, np.float32(theirs["entropy"]), "entropy")


TEMPERATURES = sorted(float(key.split("/")[0][1:]) for key in read("rl/entropy")[1] if key.endswith("/entropy"))


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_entropy(temperature: float) -> None:
    _, arrays = read("rl/entropy")
    close(entropies(arrays["logits"], temperature), arrays[f"t{temperature}/entropy"], "entropy")


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_log_probabilities_and_gradients_at_a_temperature(temperature: float) -> None:
    """The head's scores against TRL's, and the gradient of their weighted sum against automatic differentiation."""
    _, arrays = read("rl/entropy")
    logits, tokens = arrays["logits"].reshape(-1, arrays["logits"].shape[-1]), arrays["tokens"].reshape(-1)
    table, shard = np.eye(logits.shape[1], dtype=np.float32), VocabularyShard(0, logits.shape[1], ())
    log_p, _ = token_scores(logits, table, tokens, shard, chunk=5, temperature=temperature)
    close(log_p, arrays[f"t{temperature}/logps"].reshape(-1), "log p")
    weights = np.linspace(0.1, 1, len(tokens), dtype=np.float32)
    objective = Objective(weigh=lambda log_p, facts: facts[:, 0], temperature=temperature)
    sums, gradient, _, _, scores = loss_and_gradients(
        logits, table, tokens, weights[:, None], shard, objective, chunk=5
    )
    assert scores is not None
    close(scores[:, 0], log_p, "log p of the loss")
    close(scores[:, 1], arrays[f"t{temperature}/entropy"].reshape(-1), "entropy of the loss")

    def plain(logits: jax.Array) -> jax.Array:
        at_labels = jnp.take_along_axis(jax.nn.log_softmax(logits / temperature), tokens[:, None], 1)[:, 0]
        return -jnp.sum(weights * at_labels)

    close(sums["loss"], plain(logits), "loss")
    close(gradient, jax.grad(plain)(logits), "gradient")


def test_advantages() -> None:
    _, arrays = read("rl/advantages")
    rewards, weights, size = (arrays[name] for name in ("rewards_per_func", "weights", "num_generations"))
    for key in [key for key in arrays if key.startswith("grpo/")]:
        _, aggregation, scale = key.split("/")
        actual = group_advantages(rewards, weights, int(size), scale=scale, aggregation=aggregation)
        np.testing.assert_allclose(actual, arrays[key], rtol=1e-5, atol=1e-6, err_msg=key)
