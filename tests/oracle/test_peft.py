"""Adapters of PEFT for a folder of the reference values: logits beside the weights and merged, weights, gradients."""

import json

import numpy as np
import pytest
from huggingface_cases import TOLERANCE, arrays, stored
from megatron_cases import FOLDER, FURTHER, Comparison, cases, unsupported
from megatron_run import OneDevice, lm_batch
from megatron_weights import stats

from megajax.config.errors import UserError
from megajax.interop.huggingface.registry import families
from megajax.interop.peft.folder import adapter_files
from megajax.interop.weights.adapters import merged
from megajax.interop.weights.foreign import export_tensor
from megajax.interop.weights.formats import Reading, open_stored
from tests.interop.hugging_face_folders import ArraySource


@pytest.mark.parametrize("case", cases(path.parent.name for path in FURTHER.glob("peft/*/adapter_config.json")))
def test_adapter(case: str) -> None:
    folder = FURTHER / "peft" / case
    named = json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] or "llama"
    base, io = f"hf:{FOLDER / 'hf' / named.rpartition('/')[2]}", stored(folder)
    try:
        adapted = open_stored(f"peft:{folder}", Reading(base=base))
    except UserError as error:
        if "not supported" not in str(error):
            raise
        unsupported(str(error))
    compare, ids = Comparison(case), io["input_ids"].astype(np.int32)
    labels, plain = np.roll(ids, -1, axis=1), open_stored(base)
    for kind, model in (("logits", adapted), ("merged_logits", merged(adapted)), ("base_logits", plain)):
        logits = OneDevice(model.model).forward(arrays(model)[0], ids, labels)["logits"]
        compare.check(kind, logits, io[kind], TOLERANCE)
    table = {tensor.name: tensor for tensor in plain.foreign.table}
    for name in (key.removeprefix("merged/") for key in io if key.startswith("merged/")):
        weight = export_tensor(table[name], merged(adapted).weights, np.dtype(np.float32))
        compare.check("merged weights", weight, io[f"merged/{name}"], TOLERANCE, name=name)
    mask = np.ones(ids.shape, np.float32)
    mask[:, -1] = 0
    gradients = OneDevice(adapted.model).gradients(arrays(adapted)[0], lm_batch([(ids, labels, mask)]), "tokens")
    compare.check("loss", gradients["minimised"], io["loss"], TOLERANCE)
    if "grad_stats" in io and not adapted.model.lora.decomposed:
        _, theirs = adapter_files(adapted.model, families()[plain.origin.family], ArraySource(gradients["grads"]), None)
        names = [
            name.replace(".default.", ".") for name, _ in json.loads((folder / "meta.json").read_text())["trainable"]
        ]
        compare.check("gradients", stats({name: theirs[name] for name in names}), io["grad_stats"], 1e-4)
    compare.finish()
