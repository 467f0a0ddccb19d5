"""Mamba-2 with isolated documents has the losses of one device on every layout, pipelines included."""

from dataclasses import replace

import pytest
from test_hybrid_layouts import assert_same_training
from tiny_runs import ONE, llama, train

from megajax.layers.block.config import BlockConfig
from megajax.layers.mamba.config import Mamba2Config
from megajax.layers.stack.config import StackConfig
from megajax.mesh.config import ParallelConfig

SPACE = BlockConfig(mixer=Mamba2Config(heads=4, head_dim=6, state=5, groups=2, chunk=8))
MODEL = replace(
    llama(),
    stack=StackConfig(pattern=(SPACE, BlockConfig(mlp=llama().stack.pattern[0].mlp)), repeats=4),
)
LAYOUTS = {
    "1f1b, tensor, sequence": ParallelConfig(pipeline=2, tensor=2, data=2, sequence=True),
    "interleaved, fsdp": ParallelConfig(
        pipeline=2, virtual_stages=2, schedule="interleaved", data=2, data_sharding="fsdp"
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("parallel", LAYOUTS.values(), ids=LAYOUTS)
def test_losses_equal_those_of_one_device(parallel: ParallelConfig) -> None:
    assert_same_training(train(MODEL, parallel, microbatches=4), train(MODEL, ONE, microbatches=4))
