"""The layers of attention_memory.py call fused kernels, and hold no scores."""

import pytest
from attention_memory import HEADS, ROWS, compiled, layers

from megajax.config.errors import UserError
from megajax.planning import virtual_devices as devices

LENGTH = 512
SCORES = ROWS * HEADS * LENGTH**2 * 4
"""Bytes of the scores of one attention."""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "attentions"), [("bert", 1), ("t5", 2)])
def test_layers_of_encoders_and_decoders_hold_no_scores(name: str, attentions: int) -> None:
    try:
        devices.prepare()
    except UserError as error:
        pytest.skip(str(error).splitlines()[0])
    fused, temporary = compiled(layers("cudnn")[name], LENGTH)
    # Of each attention, Pallas has a forward and two backward kernels for rows whose padding is not at their end.
    expected = {"__cudnn$fmhaSoftmax": 1, "__cudnn$fmhaSoftmaxBackward": 1, "__gpu$xla.gpu.triton": 3}
    assert {target: fused.count(target) for target in fused} == {key: n * attentions for key, n in expected.items()}
    plain, more = compiled(layers("reference")[name], LENGTH)
    assert not plain and more - temporary > attentions * SCORES
