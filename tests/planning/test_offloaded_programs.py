"""Activations offloaded to host memory, in programs compiled for a virtual GPU."""

import importlib.util
import re
from dataclasses import replace

import pytest
from tiny_runs import ONE, build_program, llama

from megajax.planning.program.train_step import compile_train_step
from megajax.planning.virtual_devices import prepare, read_cluster


def installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


@pytest.mark.skipif(
    not (installed("jax_cuda12_plugin") and installed("nvidia.cudnn")),
    reason="needs the compiler for GPUs and cuDNN: the extra aot",
)
def test_each_array_has_a_buffer_in_host_memory_that_is_never_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys are as large as values, and gates as the arrays they multiply: buffers of equal size become one."""
    for name in ("JAX_PLATFORMS", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"):
        monkeypatch.setenv(name, "")
    prepare()
    model = replace(llama(), offload=("query_key_value", "mlp"))
    cfg = build_program(model, ONE, microbatches=2, compute="bfloat16").cfg
    cluster, _ = read_cluster("h100:1")
    assert cluster is not None
    text = compile_train_step(cfg, cluster).text
    assert len(re.findall(r'custom_call_target="AllocateBuffer"', text)) == len(("query", "key", "value", "gate", "up"))
    assert not re.findall(r"S\(5\)\} copy\(", text)
