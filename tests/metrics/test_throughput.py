"""Rates from seconds and counts, the peaks of devices, the time left."""

import pytest

from megajax.metrics.throughput import StepRate, mean_rates, peak_bf16_flops


@pytest.mark.parametrize(
    ("kind", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA L40S", 362),
        ("NVIDIA L40", 181),
        ("NVIDIA L4", 121),
        ("NVIDIA A10G", 70),
        ("NVIDIA GeForce RTX 4090", 165.2),
        *((kind, None) for kind in ("cpu", "Tesla T4", "TPU v9")),
        *((kind, None) for kind in ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", "NVIDIA GeForce RTX 4090 Laptop GPU")),
    ],
)
def test_peaks_of_devices(kind, tflops):
    assert peak_bf16_flops(kind) == (tflops and tflops * 1e12)


def test_rates_by_hand():
    # 1024 x 2048 tokens in 4 s on 64 devices: 8192 tokens/s/device; at 50 GFLOP a token 409.6 TFLOP/s.
    rate = StepRate(devices=64, flops_per_token_causal=5e10, flops_per_token_full=6e10, peak_flops=989e12)
    rates = rate.rates(4.0, 1024 * 2048)
    assert rates.tokens_per_second == 524288
    assert rates.tokens_per_second_per_device == 8192
    assert rates.tflops_per_device_causal == pytest.approx(409.6)
    assert rates.tflops_per_device_full == pytest.approx(491.52)
    assert rates.mfu_causal == pytest.approx(0.41415571)
    assert rates.mfu_full == pytest.approx(0.49698686)


def test_no_peak_no_mfu_and_no_clock_no_speed():
    rates = StepRate(devices=1, flops_per_token_causal=1e9, flops_per_token_full=1e9).rates(1.0, 10)
    assert rates.tflops_per_device_causal == pytest.approx(0.01)
    assert rates.mfu_causal is rates.mfu_full is None
    assert StepRate(devices=1, flops_per_token_causal=1e9).rates(0.0, 10).tflops_per_device_causal is None


def test_mean_rates_are_total_work_over_total_time():
    rate = StepRate(devices=2)
    mean = mean_rates([rate.rates(1.0, 100), rate.rates(3.0, 100)])
    assert mean.step_seconds == 2.0
    assert mean.tokens_per_second == pytest.approx(50.0)
    assert mean.tokens_per_second_per_device == pytest.approx(25.0)
    assert mean.mfu_causal is None
