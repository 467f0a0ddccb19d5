"""Reported faults of cuDNN are refused by versions, devices and sizes, and named."""

from dataclasses import replace

import pytest

from megajax.config.errors import UserError
from megajax.kernels.attention.capability import BACKENDS, KNOWN_FAULTS, Device, Request, choose
from megajax.mesh.context_parallelism import ContextSharding

H200 = Device(name="NVIDIA H200", capability=(9, 0), cudnn=(9, 28, 0))
B200 = Device(name="NVIDIA B200", capability=(10, 0), cudnn=(9, 28, 0))
PLAIN = Request(dtype="bfloat16", key_dim=128, value_dim=128, length=4096)
DOCUMENTS = replace(PLAIN, documents=True)
BOTH_WAYS = replace(PLAIN, causal=False)
RING = ContextSharding(4, 1, "ring")
PYTORCH, FRONTEND = "pytorch/issues/196678", "cudnn-frontend/pull/628"
TRANSFORMER_ENGINE = "TransformerEngine/pull/2344"


def on(device: Device, *version: int) -> Device:
    return replace(device, cudnn=version)


@pytest.mark.parametrize(
    ("kernel", "request_", "device", "report"),
    [
        ("cudnn_mask", replace(DOCUMENTS, length=704), H200, PYTORCH),
        ("cudnn_mask", replace(DOCUMENTS, length=64), on(H200, 9, 20, 0), PYTORCH),
        ("cudnn_mask", replace(DOCUMENTS, length=768), H200, ""),
        ("cudnn_mask", replace(DOCUMENTS, length=736), H200, ""),
        ("cudnn_mask", replace(DOCUMENTS, length=704), B200, ""),
        ("cudnn", replace(DOCUMENTS, length=704), H200, ""),
        ("cudnn", replace(PLAIN, length=704), H200, ""),
        ("cudnn", replace(BOTH_WAYS, length=704), H200, FRONTEND),
        ("cudnn_mask", replace(BOTH_WAYS, length=704), H200, FRONTEND),
        ("cudnn", replace(BOTH_WAYS, length=704, padded=True), H200, ""),
        ("cudnn", replace(BOTH_WAYS, cross=True, length=512, key_length=192), H200, FRONTEND),
        ("cudnn", replace(BOTH_WAYS, cross=True, length=192, key_length=512), H200, ""),
        ("cudnn", replace(PLAIN, length=4 * 704, sharding=RING), H200, FRONTEND),
        ("cudnn", replace(PLAIN, length=8 * 704, sharding=RING), H200, FRONTEND),
        ("cudnn", replace(PLAIN, length=4096, sharding=RING), H200, ""),
        ("cudnn", replace(PLAIN, length=1000), on(B200, 9, 15, 0), TRANSFORMER_ENGINE),
        ("cudnn", replace(PLAIN, length=1000), on(B200, 9, 15, 1), ""),
        ("cudnn_mask", replace(DOCUMENTS, length=1000), on(B200, 9, 12, 0), TRANSFORMER_ENGINE),
        ("cudnn", replace(DOCUMENTS, length=1000), on(B200, 9, 12, 0), ""),
        ("cudnn", replace(DOCUMENTS, window=128), on(H200, 9, 14, 0), TRANSFORMER_ENGINE),
        ("cudnn", replace(DOCUMENTS, window=128), on(H200, 9, 15, 1), ""),
        ("cudnn", replace(DOCUMENTS, window=128, length=1024), on(H200, 9, 14, 0), ""),
        ("cudnn", replace(PLAIN, key_dim=192, value_dim=160), on(H200, 9, 12, 0), "cudnn-frontend/pull/166"),
        ("cudnn", replace(PLAIN, key_dim=192, value_dim=160), on(H200, 9, 13, 0), ""),
        ("cudnn", replace(PLAIN, key_dim=192), on(H200, 9, 12, 0), ""),
        ("cudnn", PLAIN, on(H200, 9, 10, 1), "fused_attn.cpp"),
        ("cudnn", PLAIN, on(H200, 9, 10, 2), ""),
    ],
)
def test_a_fault_is_refused_where_it_was_reported(kernel: str, request_: Request, device: Device, report: str) -> None:
    refusal = BACKENDS[kernel].refusal(request_, device)
    assert (refusal is None) == (report == ""), refusal
    assert report in (refusal or "")
    without = replace(BACKENDS[kernel], faults=())
    assert without.refusal(request_, device) is None, "refused by another rule: the row would never be reached"


def test_the_error_names_fault_and_version_range_and_report_and_remedy() -> None:
    with pytest.raises(UserError) as caught:
        choose("cudnn_mask", replace(DOCUMENTS, length=704), H200, "mixer.kernel")
    assert str(caught.value) == (
        "mixer.kernel=cudnn_mask: cuDNN's attention with a mask gives NaN gradients of queries where all scores of a "
        "query are far below 0 (their log-sum-exp below -88) and keys are 64 more than a multiple of 128, on NVIDIA "
        "H200: a fault of cuDNN of any version, without a known fix, here is 9.28.0 "
        "(https://github.com/pytorch/pytorch/issues/196678); set rows of a multiple of 128 tokens. Set "
        "mixer.kernel=cudnn or auto."
    )
    with pytest.raises(
        UserError, match=r"from 9\.14 on, fixed in 9\.14\.1, here is 9\.14\.0 .*; install a newer cuDNN"
    ):
        choose("cudnn", replace(DOCUMENTS, window=128), on(H200, 9, 14, 0))


def test_auto_takes_the_next_kernel_and_gives_the_reason() -> None:
    choice = choose("auto", replace(BOTH_WAYS, length=704), H200)
    assert choice.kernel == "pallas"
    assert "cudnn: gives NaN gradients" in choice.reasons[0] and FRONTEND in choice.reasons[0]


def test_every_row_belongs_to_a_backend_and_has_a_remedy() -> None:
    assert {kernel for fault in KNOWN_FAULTS for kernel in fault.kernels} == {"cudnn", "cudnn_mask"}
    for fault in KNOWN_FAULTS:
        assert all(fault in BACKENDS[kernel].faults for kernel in fault.kernels)
        assert fault.report.startswith("https://github.com/") and fault.change
        assert not fault.applies(Request()) or fault.effect.startswith("is not used")


@pytest.mark.parametrize("device", [H200, B200])
def test_single_queries_are_refused_by_another_rule(device: Device) -> None:
    """As reported in cudnn-frontend#1072 (9.25, 9.26) and pytorch#193893 (B200, fewer than 8 key-value heads)."""
    for kernel in ("cudnn", "cudnn_mask"):
        refusal = BACKENDS[kernel].refusal(replace(BOTH_WAYS, cross=True, length=1, key_length=128), device)
        assert refusal is not None and refusal.startswith("takes rows of even length, not of 1")
