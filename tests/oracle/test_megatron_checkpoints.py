"""Megatron-LM's folders of BERT and T5 with the reference weights give the reference logits.

tests/interop/megatron/test_megatron_core_folders.py has decoders, in folders that megatron-core saved.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from megatron_cases import FOLDER, Comparison, load_arrays
from megatron_folders import Shares, write_ranks, write_sharded
from megatron_run import OneDevice
from megatron_weights import weight_by_rule
from test_other_models import META, bert_rows, t5_rows

from megajax.interop.megatron.checkpoints.format import open_model
from megajax.layers.param import bind

LOGITS = 1e-4
SHARED: dict[str, Any] = {
    "num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "kv_channels": 16, "ffn_hidden_size": 256,
    "seq_length": 32, "max_position_embeddings": 32, "vocab_size": 128, "padded_vocab_size": 128,
    "hidden_dropout": 0.0, "attention_dropout": 0.0, "position_embedding_type": "learned_absolute",
    "normalization": "LayerNorm", "add_bias_linear": True, "bias_gelu_fusion": False, "transformer_impl": "local",
}  # fmt: skip
T5 = {**SHARED, "encoder_seq_length": 32, "decoder_seq_length": 20}
CASES = {"bert_nsp": SHARED, "t5_learned": T5}


def reference_weights(case: str) -> dict[str, np.ndarray]:
    """The weights that the reference model's rule gives."""
    return {name: weight_by_rule(name, shape) for name, shape in META[case]["params"].items()}


def weights_of(folder: Path, model: OneDevice) -> dict[str, np.ndarray]:
    """Ours, by path."""
    source = open_model(folder).foreign.weights
    shapes = {path: shape for path, shape in source.shapes.items() if path in model.declared}
    return {path: source.read(path, tuple(slice(0, size) for size in shape)) for path, shape in shapes.items()}


@pytest.mark.parametrize("case", CASES)
def test_logits(case: str, tmp_path: Path) -> None:
    if not (FOLDER / "numerics" / f"{case}.npz").is_file():
        pytest.skip(f"no reference values at {FOLDER}: set MEGAJAX_ORACLE_DIR")
    args, weights = CASES[case], reference_weights(case)
    shares = Shares(tensor=2, pipeline=2, gated=False)
    ranks = write_ranks(tmp_path / "ranks", weights, args, shares)
    sharded = write_sharded(tmp_path / "sharded", weights, args, shares)
    model, stored = OneDevice(open_model(ranks).foreign.model), load_arrays(f"numerics/{case}.npz")
    params, compare = model.checked(weights_of(ranks, model)), Comparison(case)
    for path, array in weights_of(sharded, model).items():
        np.testing.assert_array_equal(array, params[path], err_msg=path)
    rows = (bert_rows if case.startswith("bert") else t5_rows)(stored)
    logits = model(lambda params, rows: bind(model.abstract, params)(**rows), params, rows)
    real = rows["segment_ids"][:, ::4] == 1
    compare.check("logits", logits[:, ::4][real], stored["logits_every4th"][real], LOGITS)
    compare.finish()
