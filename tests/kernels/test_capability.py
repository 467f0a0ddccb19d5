"""The attention backend chosen on each GPU, refusals, and the reported faults of cuDNN."""

from dataclasses import replace

import jax
import jaxlib
import pytest
from gpu_stand_in import KIND, CudaVersions, stand_in
from user_errors import user_error

from megajax.config.errors import UserError
from megajax.kernels.attention.attention import PASSES, local_device
from megajax.kernels.attention.capability import BACKENDS, RANKS, choose, in_order
from megajax.kernels.attention.faults import KERNEL_FAULTS
from megajax.kernels.attention.request import KernelDevice, KernelRequest
from megajax.mesh.config import ContextSharding

H100 = KernelDevice(name="H100", capability=(9, 0), cudnn=(9, 28, 0))
A100 = KernelDevice(name="A100", capability=(8, 0), cudnn=(9, 28, 0))
L40S = KernelDevice(name="L40S", capability=(8, 9), cudnn=(9, 28, 0))
THOR = KernelDevice(name="Thor", capability=(11, 0), cudnn=(9, 28, 0))
B200 = KernelDevice(name="B200", capability=(10, 0), cudnn=(9, 28, 0))
DESKTOP = KernelDevice(name="RTX 5090", capability=(12, 0), cudnn=(9, 28, 0))
PLAIN = KernelRequest(dtype="bfloat16", key_dim=128, value_dim=128, length=4096)
ACROSS = replace(PLAIN, causal=False, cross=True, key_length=512)
LATENT = replace(PLAIN, key_dim=192)


@pytest.mark.parametrize(
    ("device", "request_", "kernel", "why"),
    [
        (H100, PLAIN, "cudnn", ()),
        (A100, PLAIN, "pallas", ()),
        (L40S, PLAIN, "cudnn", ()),
        (DESKTOP, PLAIN, "pallas", ()),
        (A100, replace(PLAIN, dtype="float32"), "reference", ("pallas, cudnn, cudnn_mask: computes in bfloat16",)),
        (replace(L40S, cudnn=None), PLAIN, "pallas", ("runs from cuDNN 9.2 on, none was found",)),
        (KernelDevice(name="V100", capability=(7, 0)), PLAIN, "reference", ("runs from compute capability 8.0 on",)),
        (
            KernelDevice(name="cpu"),
            PLAIN,
            "reference",
            ("cudnn, pallas, cudnn_mask: needs an NVIDIA GPU, jax found cpu",),
        ),
        (A100, replace(PLAIN, window=128, sink=True), "pallas", ()),
        (H100, replace(PLAIN, documents=True), "cudnn", ()),
        (L40S, replace(PLAIN, documents=True), "pallas", ("cudnn: isolates documents from compute capability 9.0 on",)),
        (THOR, replace(PLAIN, documents=True), "pallas", ("below compute capability 11, Thor has 11.0",)),
        (H100, LATENT, "cudnn", ()),
        (replace(H100, cudnn=(9, 9, 0)), LATENT, "pallas", ("of 192 with values of 128 from cuDNN 9.10 on",)),
        (L40S, LATENT, "pallas", ("cudnn: takes heads of 192 with values of 128 from compute capability 9.0 on",)),
        (B200, LATENT, "cudnn", ()),
        (replace(B200, cudnn=(9, 10, 0)), LATENT, "pallas", ("from cuDNN 9.11 on, here is 9.10.0",)),
        (B200, replace(LATENT, documents=True), "pallas", ("takes heads of 192 below compute capability 10.0",)),
        (H100, replace(LATENT, documents=True), "cudnn", ()),
        (H100, replace(PLAIN, key_dim=256, value_dim=256), "cudnn", ()),
        (H100, replace(PLAIN, key_dim=512, value_dim=512), "reference", ("takes heads up to 256, not of 512",)),
        (H100, replace(PLAIN, key_dim=72, value_dim=72), "cudnn", ()),
        (H100, replace(PLAIN, length=4095), "pallas", ("cudnn: takes rows of even length, not of 4095",)),
        (H100, replace(PLAIN, dtype="float32"), "reference", ("cudnn, pallas, cudnn_mask: computes in bfloat16 or",)),
        (H100, replace(PLAIN, bias=True), "reference", ("has no bias of scores",)),
        (H100, replace(PLAIN, key_dim=256, cap=True), "pallas", ("cudnn: has no soft cap of scores",)),
        (H100, replace(PLAIN, dropout=0.1), "reference", ("the same on every layout, which is 0.1",)),
        (H100, replace(PLAIN, causal=False, window=3), "pallas", ("has windows in causal attention only",)),
        (L40S, replace(PLAIN, causal=False, padded=True), "cudnn", ()),
        (L40S, replace(ACROSS, padded=True), "cudnn", ()),
        (H100, replace(ACROSS, key_length=511), "pallas", ("cudnn: takes rows of even length, not of 511",)),
        (H100, replace(ACROSS, documents=True), "pallas", ("does not isolate documents between two sequences",)),
    ],
)
def test_auto_chooses_the_fastest_supported_backend(
    device: KernelDevice, request_: KernelRequest, kernel: str, why: tuple[str, ...]
) -> None:
    choice = choose("auto", request_, device)
    assert choice.kernel == kernel
    assert len(choice.reasons) >= len(why)
    for part in why:
        assert part in "; ".join(choice.reasons)
    assert choose(kernel, request_, device).kernel == kernel


def test_every_order_of_a_capability_has_all_backends_with_the_exact_ones_last() -> None:
    for rank in RANKS:
        device = KernelDevice(name="GPU", capability=rank.capability[0])
        order = tuple(in_order(device))
        assert order[: len(rank.first)] == rank.first and rank.why
        assert set(order) == set(BACKENDS) and order[-3:] == ("reference", "fixed", "blocks")
        assert tuple(in_order(replace(device, capability=rank.capability[1]))) == tuple(BACKENDS)


def test_an_unsupported_backend_is_an_error_with_an_alternative() -> None:
    with pytest.raises(UserError) as caught:
        choose("cudnn", replace(PLAIN, documents=True), A100, "model.kernel")
    assert str(caught.value) == (
        "model.kernel=cudnn: cuDNN's attention isolates documents from compute capability 9.0 on, A100 has 8.0. "
        "Set model.kernel=pallas or auto."
    )
    with user_error():
        choose("pallas", PLAIN, KernelDevice(name="cpu"))


def test_every_backend_exists_and_the_reference_supports_everything() -> None:
    assert set(BACKENDS) == set(PASSES) and list(BACKENDS)[-3:] == ["reference", "fixed", "blocks"], (
        "auto chooses none after the reference"
    )
    hard = KernelRequest(
        dtype="float64", key_dim=7, value_dim=9, length=3, causal=False, window=1, documents=True, sink=True
    )
    assert BACKENDS["reference"].refusal(replace(hard, bias=True, dropout=0.5), KernelDevice(name="cpu")) is None


@pytest.mark.parametrize(
    ("client", "cudnn", "expected"),
    [
        ("PJRT C API\ncuda 12090", 91002, KernelDevice(name=KIND, capability=(9, 0), cudnn=(9, 10, 2))),
        ("PJRT C API\ncuda 12090", 0, KernelDevice(name=KIND, capability=(9, 0))),
        ("PJRT C API\nrocm 60300", 91002, KernelDevice(name=KIND)),
    ],
)
def test_a_gpu_has_its_capability_and_cudnn_version(client, cudnn, expected, monkeypatch) -> None:
    stand_in(monkeypatch)
    monkeypatch.setattr(jaxlib._jax.Client, "platform_version", property(lambda _: client))
    monkeypatch.setattr(CudaVersions, "cudnn_get_version", lambda: cudnn)
    assert local_device() == expected
    monkeypatch.setattr("megajax.kernels.attention.attention.cuda_versions", None)
    assert local_device().cudnn is None


RING, GATHER = ContextSharding(4, 1, "ring"), ContextSharding(4, 1, "all_gather")
HEADS = ContextSharding(4, 1, "all_to_all", exchanging=4)
GROUPS, PLAIN_CHUNKS = ContextSharding(4, 1, "ring+all_to_all", exchanging=2), ContextSharding(4, 0, "all_gather")
BOTH_WAYS = replace(PLAIN, causal=False)


@pytest.mark.parametrize(
    ("request_", "sharding", "kernel", "why"),
    [
        (PLAIN, GATHER, "cudnn", ""),
        (PLAIN, RING, "cudnn", ""),
        (PLAIN, GROUPS, "cudnn", ""),
        (PLAIN, HEADS, "cudnn", ""),
        (replace(PLAIN, sink=True), RING, "cudnn", ""),
        (replace(PLAIN, documents=True), GATHER, "cudnn", ""),
        (replace(PLAIN, documents=True), RING, "pallas", "isolates no documents over parallel.context=4 with"),
        (replace(PLAIN, documents=True), GROUPS, "pallas", "parallel.context_strategy=ring+all_to_all"),
        (replace(PLAIN, documents=True, window=7), HEADS, "cudnn", ""),
        (replace(PLAIN, window=7), GATHER, "pallas", "has no windows in parts of rows, and window=7 over"),
        (
            replace(PLAIN, window=7),
            RING,
            "pallas",
            "window=7 over parallel.context=4 with parallel.context_strategy=ring",
        ),
        (BOTH_WAYS, PLAIN_CHUNKS, "cudnn", ""),
        (replace(BOTH_WAYS, padded=True), replace(RING, rounds=0), "cudnn", ""),
        (replace(BOTH_WAYS, documents=True), PLAIN_CHUNKS, "pallas", "attention is not causal over parallel.context=4"),
        (replace(BOTH_WAYS, documents=True), HEADS, "cudnn", ""),
        (replace(PLAIN, padded=True), GATHER, "cudnn", ""),
        (replace(PLAIN, padded=True), RING, "pallas", "two chunks a device without padding, and rows are padded"),
        (PLAIN, replace(RING, rounds=2), "pallas", "and a device has chunks=4 of a row"),
        (PLAIN, replace(GATHER, rounds=2), "cudnn", ""),
        (replace(PLAIN, length=4104), GATHER, "pallas", "takes chunks of even length, not of 513 over"),
        (replace(PLAIN, dropout=0.1), RING, "reference", "dropout"),
        (replace(PLAIN, bias=True), GATHER, "reference", "bias"),
    ],
)
def test_auto_chooses_by_the_strategy_too(
    request_: KernelRequest, sharding: ContextSharding, kernel: str, why: str
) -> None:
    choice = choose("auto", replace(request_, sharding=sharding), H100)
    assert choice.kernel == kernel
    assert why in "; ".join(choice.reasons) and bool(why) == bool(choice.reasons)


@pytest.mark.parametrize("sharding", [GATHER, RING, GROUPS])
def test_masks_of_scores_need_whole_rows(sharding: ContextSharding) -> None:
    with user_error():
        choose("cudnn_mask", replace(PLAIN, sharding=sharding), H100)
    assert choose("cudnn_mask", replace(PLAIN, sharding=HEADS), H100).kernel == "cudnn_mask"


def test_the_reference_and_pallas_take_any_sharding_of_rows() -> None:
    for sharding in (GATHER, RING, GROUPS, HEADS, PLAIN_CHUNKS):
        hard = replace(PLAIN, window=3, documents=True, sink=True, sharding=sharding)
        assert BACKENDS["pallas"].refusal(hard, H100) is None
        assert BACKENDS["reference"].refusal(replace(hard, dropout=0.1), KernelDevice(name="cpu")) is None
        float32 = replace(PLAIN, dtype="float32", sharding=sharding)
        assert choose("auto", float32, KernelDevice(name="cpu")).kernel == "reference"


H200 = KernelDevice(name="NVIDIA H200", capability=(9, 0), cudnn=(9, 28, 0))
B200 = KernelDevice(name="NVIDIA B200", capability=(10, 0), cudnn=(9, 28, 0))
DOCUMENTS = replace(PLAIN, documents=True)
B300 = KernelDevice(name="NVIDIA B300", capability=(10, 3), cudnn=(9, 28, 0))
PYTORCH, FRONTEND = "pytorch/issues/196678", "cudnn-frontend/pull/628"
TRANSFORMER_ENGINE = "TransformerEngine/pull/2344"


def on(device: KernelDevice, *version: int) -> KernelDevice:
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
        ("cudnn", PLAIN, on(B300, 9, 9, 0), "cudnn-frontend/issues/203"),
        ("cudnn", PLAIN, on(B300, 9, 11, 0), ""),
        ("cudnn", PLAIN, on(H200, 9, 10, 2), ""),
    ],
)
def test_a_fault_is_refused_where_it_was_reported(
    kernel: str, request_: KernelRequest, device: KernelDevice, report: str
) -> None:
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
    message = r"from 9\.14 on, fixed in 9\.14\.1, here is 9\.14\.0 .*; install a newer cuDNN"
    with pytest.raises(UserError, match=message):
        choose("cudnn", replace(DOCUMENTS, window=128), on(H200, 9, 14, 0))


def test_auto_takes_the_next_kernel_and_gives_the_reason() -> None:
    choice = choose("auto", replace(BOTH_WAYS, length=704), H200)
    assert choice.kernel == "pallas"
    assert "cudnn: gives NaN gradients" in choice.reasons[0] and FRONTEND in choice.reasons[0]


def test_every_row_belongs_to_a_backend_and_has_a_remedy() -> None:
    assert {kernel for fault in KERNEL_FAULTS for kernel in fault.kernels} == {"cudnn", "cudnn_mask"}
    for fault in KERNEL_FAULTS:
        assert all(fault in BACKENDS[kernel].faults for kernel in fault.kernels)
        assert fault.report.startswith("https://github.com/") and fault.cure
        assert not fault.applies(KernelRequest()) or fault.name in ("cudnn_9_10", "b300")


@pytest.mark.parametrize("device", [H200, B200])
def test_single_queries_are_refused_by_another_rule(device: KernelDevice) -> None:
    """Faults with them are reported in cudnn-frontend#1072 (9.25, 9.26) and pytorch#193893 (B200)."""
    for kernel in ("cudnn", "cudnn_mask"):
        refusal = BACKENDS[kernel].refusal(replace(BOTH_WAYS, cross=True, length=1, key_length=128), device)
        assert refusal is not None and refusal.startswith("takes rows of even length, not of 1")


def test_the_local_device() -> None:
    device = local_device()
    assert device.name == jax.devices()[0].device_kind
    assert (device.capability is None) == (jax.devices()[0].platform != "gpu")
