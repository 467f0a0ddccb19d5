"""Operations as bytes: the same trees on the other side, and nothing but trees of arrays."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.inference.device import Embedder
from megajax.inference.processes.group import decode, encode
from megajax.inference.sampling.choose import Choosing
from megajax.inference.sampling.chooser import PromptScorer, RowChooser
from megajax.inference.step_arrays import Bucket, Texts, pack

BUCKET = Bucket(3, 2, 4, 1)


def operations() -> list[Any]:
    arrays = pack(None, BUCKET, block=4, width=500)
    arrays.tables[0][1, :3] = [5, 0, 7]
    inputs = [
        jax.tree.map(lambda x: np.full(x.shape, 3, x.dtype), RowChooser(program, 40).like(6)) for program in Choosing
    ]
    texts = Texts(np.ones((2, 64), np.int32), np.zeros(2, np.int32), np.arange(2, dtype=np.int32))
    return [
        ("step", (BUCKET, arrays)),
        *(("choose", (BUCKET, number, each, np.arange(3, dtype=np.int32))) for number, each in enumerate(inputs)),
        ("score", (BUCKET, PromptScorer(40), np.full(8, -1, np.int32))),
        ("score", (BUCKET, Embedder(4), np.zeros(8, np.int32))),
        ("encode", (texts,)),
        ("write_adapter", (1, {"a.lora_a": np.ones((2, 3, 4), jnp.bfloat16), "b": np.zeros((2, 0), np.float32)})),
        ("compile", (3,)),
        ("allocate", ()),
        (None, (True, 1.5, "text", np.float32(2.5), np.zeros((2, 5), bool))),
    ]


@pytest.mark.parametrize("operation", operations(), ids=lambda operation: str(operation[0]))
def test_trees_are_the_same(operation: Any) -> None:
    built = decode(bytearray(encode(operation)))
    assert jax.tree.structure(built) == jax.tree.structure(operation)
    for new, old in zip(jax.tree.leaves(built), jax.tree.leaves(operation), strict=True):
        np.testing.assert_array_equal(new, old)
        assert np.asarray(new).dtype == np.asarray(old).dtype and np.shape(new) == np.shape(old)


def test_last_columns_of_one_value_are_not_sent() -> None:
    """Most columns are, of the tables of long rows, and of masks that allow the whole vocabulary."""
    operation = operations()[0]
    assert len(encode(operation)) < 2000 < sum(np.asarray(leaf).nbytes for leaf in jax.tree.leaves(operation))
    mask = np.full((3, 4000), 2**32 - 1, np.uint32)
    mask[1, 7] = 5
    sent = encode(mask)
    assert len(sent) < 300
    np.testing.assert_array_equal(decode(sent), mask)


def test_other_objects_are_refused() -> None:
    with pytest.raises(TypeError, match="exchange no set"):
        encode(("step", {1}))
    with pytest.raises(TypeError, match="RowChooser is not among the named tuples"):
        encode(RowChooser(Choosing.GREEDY, 3))
    with pytest.raises(KeyError):
        decode(encode(BUCKET).replace(b"Bucket", b"Popeny"))
