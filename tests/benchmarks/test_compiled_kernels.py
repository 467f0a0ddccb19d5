"""Layers of BERT and T5 call fused attention kernels and do not store scores."""

import pytest

from benchmarks.kernels.compiled import HEADS, ROWS, attention_program, layers
from benchmarks.virtual_gpus import kernels
from megajax.config.errors import UserError
from megajax.planning.virtual_devices import prepare

LENGTH = 512
SCORES = ROWS * HEADS * LENGTH**2 * 4
"""Bytes of the scores of one attention."""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "attentions"), [("bert", 1), ("t5", 2)])
def test_encoder_and_decoder_layers_store_no_scores(name: str, attentions: int) -> None:
    try:
        prepare()
    except UserError as error:
        pytest.skip(str(error).splitlines()[0])
    fused = attention_program(layers("cudnn")[name], LENGTH)
    calls = {target: n for target, n in kernels(fused).items() if "fmha" in target or "triton" in target}
    # Per attention, Pallas has a forward and two backward kernels for rows whose padding is not at their end.
    expected = {"__cudnn$fmhaSoftmax": 1, "__cudnn$fmhaSoftmaxBackward": 1, "__gpu$xla.gpu.triton": 3}
    assert calls == {target: n * attentions for target, n in expected.items()}
    plain = attention_program(layers("reference")[name], LENGTH)
    assert not any("fmha" in target or "triton" in target for target in kernels(plain))
    plain_bytes, fused_bytes = (p.memory_analysis().temp_size_in_bytes for p in (plain, fused))
    assert plain_bytes - fused_bytes > attentions * SCORES
