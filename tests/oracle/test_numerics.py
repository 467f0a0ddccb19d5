"""Logits, losses, hidden states and gradients of every variant in the folder against Megatron-LM's, in float32."""

from typing import Any

import numpy as np
import pytest
from megatron_cases import FOLDER, Comparison, cases, load_arrays, load_json, unsupported
from megatron_config import decoder_config
from megatron_moe import LOGGED
from megatron_run import OneDevice, batch_by_rule, lm_batch
from megatron_weights import stats, strided, to_megatron, to_ours, weight_by_rule

LOGITS, GRADIENTS = 1e-5, 1e-4
GRADIENT_BITS = 12
"""Significand bits of `grad/{name}`."""

VARIANTS, OTHERS = load_json("numerics/variants_meta.json"), load_json("numerics/other_models_meta.json")
OWN_KEYS = {"hybrid_layer_pattern", "num_tokentypes", "patch_dim", "relative_attention_num_buckets"}
OWN_TESTS = {name for name, meta in OTHERS.items() if OWN_KEYS & meta.keys()}
"""Compared by tests of their own."""
FOUND = {path.stem for path in (FOLDER / "numerics").glob("*.npz") if not path.stem.startswith("train_")}


def parameter_shapes(case: str) -> dict[str, tuple[int, ...]]:
    """Their name -> shape, in the order of rows."""
    meta = VARIANTS[case]
    if "params" in meta:
        return {name: tuple(shape) for name, shape in meta["params"].items()}
    changed = {name: tuple(shape) for name, shape in meta["params_changed_or_added"].items()}
    shapes = parameter_shapes(meta["params_same_as"]) | changed
    return {name: shapes[name] for name in meta.get("param_order", shapes) if name not in meta["params_removed"]}


def half_a_unit(rounded: np.ndarray) -> np.ndarray:
    """Largest error of values that were rounded to GRADIENT_BITS: half the distance to the next one."""
    return np.ldexp(0.5, np.frexp(rounded.astype(np.float64))[1] - GRADIENT_BITS)


def check_gradients(
    compare: Comparison, stored: dict[str, np.ndarray], grads: dict[str, np.ndarray], noise: set[str]
) -> None:
    """Whole arrays where they are stored, and 32 values, norm, sum and largest value of each.

    noise: weights without effect on the loss, whose gradients are rounding errors on both sides.
    """
    every = float(np.sqrt(np.sum(stored["grad_stats"][:, 0] ** 2)))
    for row, name in enumerate(grads):
        if name in noise:
            both = [np.abs(grads[name]).max(), stored["grad_stats"][row, 2]]
            compare.check("gradient noise", both, [0.0, 0.0], GRADIENTS, name=name, scale=every)
    for name, key in ((key.removeprefix("grad/"), key) for key in stored if key.startswith("grad/")):
        if name in noise:
            continue
        compare.check("gradient", grads[name], stored[key], GRADIENTS, name=name, rounding=half_a_unit(stored[key]))
    ours = strided(grads), stats(grads)
    for row, name in enumerate(grads):
        if name in noise:
            continue
        norm, total, largest = stored["grad_stats"][row]
        compare.check("gradient values", ours[0][row], stored["grad_strided"][row], GRADIENTS, name=name, scale=largest)
        compare.check("gradient norm", ours[1][row, 0], norm, GRADIENTS, name=name)
        # A sum of values of both signs is bounded by its terms.
        compare.check("gradient sum", ours[1][row, 1], total, GRADIENTS, name=name, scale=norm)
        compare.check("gradient maximum", ours[1][row, 2], largest, GRADIENTS, name=name)
    compare.check("gradient norm", np.sqrt(np.sum(ours[1][:, 0] ** 2)), every, GRADIENTS, name="of all")


def check_forward(compare: Comparison, stored: dict[str, np.ndarray], actual: dict[str, np.ndarray]) -> None:
    logits = actual["logits"]
    if "logits" in stored:
        compare.check("logits", logits, stored["logits"], LOGITS)
    if "logits_sample0_every4th" in stored:
        compare.check("logits", logits[0, ::4], stored["logits_sample0_every4th"], LOGITS)
    compare.check("logits sum", np.abs(logits.astype(np.float64)).sum(), stored["logits_abs_sum"], LOGITS)
    compare.check("token losses", actual["per_token_loss"], stored["per_token_loss"], LOGITS)


def check_hidden(compare: Comparison, stored: dict[str, np.ndarray], actual: dict[str, np.ndarray]) -> None:
    """Theirs are [S, 1, D], of the first row."""
    for key in (key for key in stored if key.startswith("hidden/")):
        name = key.removeprefix("hidden/").removesuffix("_sbh")
        compare.require("hidden states", name in actual, f"no {name} among {sorted(actual)}")
        if name in actual:
            compare.check("hidden states", actual[name][0][:, None], stored[key], LOGITS, name=name)


def check_weights(compare: Comparison, stored: dict[str, np.ndarray], weights: dict[str, np.ndarray]) -> None:
    """The rule gives the values of the reference."""
    compare.check("weights", stats(weights), stored["weight_stats"], 1e-9)
    for name in weights:
        if f"weight/{name}" in stored:
            compare.check("weights", weights[name], stored[f"weight/{name}"], 0.0, name=name)


def check_losses(
    compare: Comparison, stored: dict[str, np.ndarray], meta: dict[str, Any], actual: dict[str, Any]
) -> None:
    """The minimised loss, and the reported one: the mean over all tokens."""
    sums = stored["loss_sum_and_ntokens_per_microbatch"].astype(np.float64)
    compare.check("reported loss", actual["reported"], sums[:, 0].sum() / sums[:, 1].sum(), LOGITS)
    main = actual["minimised"]
    if actual["ahead"] and meta["micro"] == 1:
        # Theirs excludes further predictions; they are logged separately.
        tracked = np.array(meta["mtp_tracker"]["loss_values"])
        compare.check("losses further ahead", actual["ahead"], tracked, LOGITS)
        main = main - meta["config"].get("mtp_loss_scaling_factor", 0.1) * np.mean(actual["ahead"])
    if actual["ahead"] and meta["micro"] > 1:
        return
    compare.check("loss", main, stored["loss"], LOGITS)
    compare.check("loss", main, meta["loss"], LOGITS, name="in the description")


def check_routers(compare: Comparison, meta: dict[str, Any], actual: dict[int, dict[str, float]]) -> None:
    """The balancing losses of each layer's router, summed over microbatches; theirs are 0 without a router."""
    for logged, values in (meta.get("moe_aux_losses") or {}).items():
        ours = [actual[layer][LOGGED[logged]] if layer in actual else 0.0 for layer in range(len(values))]
        compare.check("router losses", ours, values, LOGITS, name=logged)


def setup_case(case: str, meta: dict[str, Any]) -> tuple[OneDevice, dict[str, tuple[int, ...]]]:
    """The model of a case and their parameter shapes, which must be those its config leads to."""
    shapes = parameter_shapes(case)
    learned = shapes.get("embedding.position_embeddings.weight", (meta["S"],))[0]
    vocabulary = shapes["embedding.word_embeddings.weight"][0]
    sizes = {"vocabulary": vocabulary, "positions": learned, "latent": bool(meta.get("mla"))}
    model = OneDevice(decoder_config(meta["config"], meta["model"], **sizes))
    expected = {name: array.shape for name, array in to_megatron(model.cfg, model.zeros()).items()}
    assert list(expected.items()) == list(shapes.items())
    return model, shapes


def noise_of(model: OneDevice) -> set[str]:
    """Their names of the weights that the loss does not depend on anywhere."""
    places = {path: np.zeros(spec.shape, bool) for path, spec in model.declared.items()} | model.undetermined()
    return {name for name, where in to_megatron(model.cfg, places).items() if where.all()}


SLOW = {
    "gpt_bias_gelu_fusion", "gpt_micro2", "llama_qk_layernorm", "llama_rotary_base500k_scaling", "llama_window8",
    "moe_group_limited", "moe_seq_aux", "moe_shared_gate", "moe_sigmoid_expert_bias",
}  # fmt: skip
"""Those that differ from gpt_base and llama_base in a setting or two, which tests of layers compare with formulas."""


def marked(case: Any) -> Any:
    return pytest.param(case, marks=pytest.mark.slow) if isinstance(case, str) and case in SLOW else case


@pytest.mark.parametrize("case", [*map(marked, cases((FOUND | set(VARIANTS) | set(OTHERS)) - OWN_TESTS))])
def test_model(case: str) -> None:
    if case in OTHERS:
        unsupported(f"model {case}")
    if case not in VARIANTS:
        unsupported(f"numerics/{case}.npz, which has no description")
    meta, stored = VARIANTS[case], load_arrays(f"numerics/{case}.npz")
    model, shapes = setup_case(case, meta)
    compare = Comparison(case)
    weights = {name: weight_by_rule(name, shape) for name, shape in shapes.items()}
    check_weights(compare, stored, weights)
    params = to_ours(model.cfg, weights)

    rows = meta["b"]
    batch = batch_by_rule(meta["batch_seed"], rows, meta["S"], model.cfg.vocabulary_size)
    for name, leaf in zip(("tokens", "labels", "loss_mask"), batch, strict=True):
        if name in stored:
            np.testing.assert_array_equal(leaf, stored[name])
    check_forward(compare, stored, model.forward(params, *batch[:2]))
    if any(key.startswith("hidden/") for key in stored):
        check_hidden(compare, stored, model.hidden(params, batch[0][:1]))

    each = rows // meta["micro"]
    microbatches = [tuple(leaf[i * each : (i + 1) * each] for leaf in batch) for i in range(meta["micro"])]
    average = "tokens" if meta["config"].get("calculate_per_token_loss") else "microbatches"
    gradients = model.gradients(params, lm_batch(microbatches), average)
    check_losses(compare, stored, meta, gradients)
    check_routers(compare, meta, gradients["routers"])
    check_gradients(compare, stored, to_megatron(model.cfg, gradients["grads"]), noise_of(model))
    compare.finish()
