"""Logits, losses and gradients of Megatron-LM's hybrids of Mamba-2, attention and MLP layers, in float32."""

import numpy as np
import pytest
from megatron_cases import Comparison, cases, load_arrays, load_json
from megatron_config import hybrid_config
from megatron_run import OneDevice, lm_batch
from megatron_weights import to_megatron, to_ours, weight_by_rule
from test_numerics import LOGITS, check_gradients, check_weights, noise_of

OTHERS = load_json("numerics/other_models_meta.json")
HYBRIDS = [name for name, meta in OTHERS.items() if "hybrid_layer_pattern" in meta]


def weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """By the rule, which hybrids modify for three kinds afterwards."""
    ruled, kind = weight_by_rule(name, shape), name.rsplit(".", 1)[-1]
    changed = {"D": 1 + ruled, "dt_bias": ruled - 2}
    if kind == "A_log":
        changed["A_log"] = np.log(np.linspace(1, 8, shape[0]))
    return changed.get(kind, ruled).astype(np.float16).astype(np.float32)


@pytest.mark.parametrize("case", cases(HYBRIDS))
def test_hybrid(case: str) -> None:
    meta, stored = OTHERS[case], load_arrays(f"numerics/{case}.npz")
    outer = {name: meta[name] for name in ("position_embedding_type",) if name in meta}
    shapes = {name: tuple(shape) for name, shape in meta["params"].items()}
    length, vocabulary = stored["tokens"].shape[1], shapes["embedding.word_embeddings.weight"][0]
    pattern = meta["hybrid_layer_pattern"]
    model = OneDevice(hybrid_config(meta["config"], outer, pattern, vocabulary=vocabulary, length=length))
    theirs = {name: array.shape for name, array in to_megatron(model.cfg, model.zeros()).items()}
    assert theirs == shapes
    compare, weights = Comparison(case), {name: weight(name, shape) for name, shape in shapes.items()}
    check_weights(compare, stored, weights)
    params = to_ours(model.cfg, weights)

    tokens, labels = (stored[name].astype(np.int32) for name in ("tokens", "labels"))
    batch = tokens, labels, stored["loss_mask"]
    actual = model.forward(params, tokens, labels)
    compare.check("logits", actual["logits"][:, ::4], stored["logits_every4th"], LOGITS)
    compare.check("token losses", actual["per_token_loss"], stored["per_token_loss"], LOGITS)
    gradients = model.gradients(params, lm_batch([batch]), "microbatches")
    compare.check("loss", gradients["minimised"], stored["loss"], LOGITS)
    grads = to_megatron(model.cfg, gradients["grads"])
    check_gradients(compare, stored, {name: grads[name] for name in shapes}, noise_of(model))
    compare.finish()
