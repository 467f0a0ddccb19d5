"""The gated delta rule against a float64 recurrence: outputs, last states and gradients of both forms."""

import json
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from megatron_cases import FURTHER

from megajax.kernels.ssm.chunks import runs_of
from megajax.kernels.ssm.gated_delta import DeltaRule, gated_delta, gated_delta_reference, unit_length

FILE = FURTHER / "gated_delta" / "gated_delta.npz"
if not FILE.is_file():
    pytest.skip(f"no {FILE}", allow_module_level=True)
ARRAYS = np.load(FILE)
CASES = json.loads(FILE.with_suffix(".json").read_text())
TOLERANCE = 1e-5
INPUTS = ("q", "k", "v", "g", "beta", "initial_state")
SLOW = pytest.mark.slow


def outputs(arrays: dict[str, Any], ids: np.ndarray | None, chunk: int, *, normalised: bool) -> Any:
    """y and the last state; chunk: 0 for the recurrence."""
    inputs = [arrays[name] for name in INPUTS[:5]]
    if normalised:
        inputs[:2] = [unit_length(x) for x in inputs[:2]]
    rule = DeltaRule(*inputs, None if ids is None else runs_of(ids), arrays.get("initial_state"))
    return gated_delta(rule, chunk) if chunk else gated_delta_reference(rule)


@pytest.mark.parametrize("chunk", [0, 64])
@pytest.mark.parametrize("case", [name if name == "segments" else pytest.param(name, marks=SLOW) for name in CASES])
def test_outputs_states_and_gradients(case: str, chunk: int) -> None:
    given = {name.partition("/")[2]: ARRAYS[name] for name in ARRAYS.files if name.startswith(f"{case}/")}
    arrays = {name: given[name] for name in INPUTS if name in given}
    ids, normalised = given.get("segment_ids"), CASES[case]["l2norm"]
    run = partial(outputs, ids=ids, chunk=chunk, normalised=normalised)

    @jax.jit
    def pulled(arrays: dict[str, Any]) -> Any:
        out, pull = jax.vjp(run, arrays)
        return out, pull((given["cot_out"], given["cot_state"]))[0]

    (y, state), gradients = pulled(arrays)
    expected = {"out": y, "final_state": state, **{f"grad_{name}": gradient for name, gradient in gradients.items()}}
    assert expected.keys() >= {name for name in given if name.startswith("grad_")}
    for name, actual in expected.items():
        scale = max(1.0, np.abs(given[name]).max())
        np.testing.assert_allclose(actual, given[name], rtol=0, atol=TOLERANCE * scale, err_msg=name)
