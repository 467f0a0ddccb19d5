"""Records of training steps."""

from collections.abc import Callable

import pytest

from megajax.metrics.record import StepRecord
from megajax.metrics.throughput import StepRate


@pytest.fixture(scope="session")
def step() -> Callable[..., StepRecord]:
    """step(number, loss, **changes): the record of a step, with plausible defaults."""

    def make(number: int, loss: float = 2.5, **changes) -> StepRecord:
        values = {
            "step": number,
            "loss": loss,
            "grad_norm": 0.9,
            "lr": 3e-4,
            "consumed_samples": 4 * number,
            "consumed_tokens": 64 * number,
            "rates": StepRate(devices=2).rates(0.5, 64),
            "global_batch_size": 4,
        }
        return StepRecord(**(values | changes))

    return make
