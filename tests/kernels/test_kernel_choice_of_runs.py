"""What a run says of its attention kernels: errors before anything is built, and lines of the start banner."""

from types import SimpleNamespace

import pytest

from megajax.config import load
from megajax.config.errors import UserError
from megajax.job import banner
from megajax.kernels.capability import Device
from megajax.training.kernels import demand_kernels

H100 = Device(name="NVIDIA H100", capability=(9, 0), cudnn=(9, 10, 0))
A100 = Device(name="NVIDIA A100", capability=(8, 0), cudnn=(9, 10, 0))
MIXER = "model.stack.pattern.0.mixer"


def config(*settings: str):
    return load("llama3.py", *settings)


def test_isolated_documents_affect_the_choice() -> None:
    assert [choice.kernel for choice in demand_kernels(config(), H100)] == ["cudnn"]
    assert [choice.kernel for choice in demand_kernels(config(), A100)] == ["pallas"]
    apart = config("data.isolate_documents=false")
    assert [choice.kernel for choice in demand_kernels(apart, A100)] == ["cudnn"]


def test_the_error_names_the_setting_and_an_alternative() -> None:
    with pytest.raises(UserError) as caught:
        demand_kernels(config(f"{MIXER}.kernel=cudnn"), A100)
    assert str(caught.value).startswith(f"{MIXER}.kernel=cudnn: cuDNN's attention isolates documents from compute")
    assert str(caught.value).endswith(f"Set {MIXER}.kernel=pallas or auto.")


@pytest.mark.parametrize(
    ("device", "settings", "lines"),
    [
        (H100, (), ["attention cudnn"]),
        (A100, (), ["attention pallas", "pallas, because cudnn: isolates documents from compute capability 9.0 on"]),
        (
            H100,
            ("precision.compute=float32",),
            ["attention reference", "reference, because cudnn, pallas, cudnn_mask:"],
        ),
        # What has no GPU has no faster kernel to speak of.
        (Device(name="cpu"), (), ["attention reference"]),
    ],
)
def test_the_banner_shows_the_kernel_and_the_reasons(device, settings, lines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megajax.training.kernels.local_device", lambda: device)
    monkeypatch.setattr(banner, "local_device", lambda: device)
    actual = banner._kernels(SimpleNamespace(cfg=config(*settings)))
    assert len(actual) == len(lines)
    assert [name for name, _ in actual] == ["kernels", "attention"][: len(lines)]
    for (_, text), begins in zip(actual, lines, strict=True):
        assert text.startswith(begins)
