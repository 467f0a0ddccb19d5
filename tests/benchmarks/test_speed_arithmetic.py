"""Rates, shares of a peak, spreads and minimum times; an unknown peak is refused."""

from types import SimpleNamespace

import pytest
from user_errors import user_error

from benchmarks.roofline import Roof, roof_of
from benchmarks.stopwatch import Spread, group_sizes, readings, readings_in
from benchmarks.training import train_speed
from megajax.config import load

H200 = "NVIDIA H200"


def test_gpt3_1_3b_by_hand() -> None:
    """24 layers of 12 x 2048^2 weights and a head of 2048 x 50304; 131,072 tokens in 2 s are 65,536 a second."""
    weights = 24 * 12 * 2048**2 + 2048 * 50304
    scores = 24 * 2 * 2048 * 2048  # multiply-adds of a token's scores and values, the whole square
    half, full = 6 * weights + 3 * scores, 6 * weights + 6 * scores
    causal = half + 3 * scores // 2048  # a query sees its own key too
    assert (half, full) == (8_469_872_640, 9_073_852_416)
    actual = train_speed.speeds(load("bench.py:gpt_1_3b"), 1, roof_of(H200, "gpu"), Spread(2.0, 1.6, 2.5, 10), 131_072)
    assert actual["flops_per_token"] == {"causal": causal, "full": full, "megatron": half}
    assert actual["tokens_per_second_per_device"]["median"] == 65_536
    assert actual["tokens_per_second_per_device"]["p10"] == pytest.approx(52_428.8)
    assert actual["tokens_per_second_per_device"]["p90"] == pytest.approx(81_920)
    assert actual["tflops_per_device"] == pytest.approx({"causal": 555.1009, "full": 594.6640}, rel=1e-6)
    assert actual["mfu"] == pytest.approx({"causal": 0.5612749, "full": 0.6012781}, rel=1e-6)
    assert actual["peak_bf16_tflops"] == 989
    assert "mfu_of_fp8_peak" not in actual


def test_eight_bits_have_two_peaks() -> None:
    cfg = load("bench.py:llama_1b", "precision.matmul=Fp8Current")
    actual = train_speed.speeds(cfg, 1, roof_of(H200, "gpu"), Spread(1.0, 1.0, 1.0, 1), 131_072)
    assert actual["mfu_of_fp8_peak"]["full"] == pytest.approx(actual["mfu"]["full"] / 2)
    assert (actual["peak_bf16_tflops"], actual["peak_fp8_tflops"]) == (989, 1978)
    on_a100 = train_speed.speeds(cfg, 1, roof_of("NVIDIA A100-SXM4-80GB", "gpu"), Spread(1.0, 1.0, 1.0, 1), 131_072)
    assert on_a100["mfu_of_fp8_peak"] == {"causal": None, "full": None}


def test_an_unknown_gpu_is_refused_before_anything_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = SimpleNamespace(device_kind="NVIDIA Z900", platform="gpu")
    monkeypatch.setattr(train_speed, "find_devices", lambda: [unknown])
    with user_error():
        train_speed.measure(load("bench.py:debug"), steps=1)


def test_a_peak_can_be_given() -> None:
    roof = roof_of("NVIDIA Z900", "gpu", peak_tflops=100)
    assert (roof.bf16, roof.fp8, roof.bandwidth) == (1e14, None, None)
    assert "--peak-tflops" in roof.source
    with user_error("--peak-tflops"):
        roof_of("NVIDIA Z900", "gpu", peak_tflops=0)


def test_the_floor_is_the_larger_of_two_times() -> None:
    roof = Roof(device="one", bf16=1e12, fp8=2e12, bandwidth=1e9)
    assert roof.floor_seconds(flops=2e12, moved=1e9) == 2.0
    assert roof.floor_seconds(flops=2e12, moved=3e9) == 3.0
    assert roof.floor_seconds(flops=2e12, moved=1e8, fp8=True) == 1.0
    assert roof_of("cpu", "cpu").floor_seconds(flops=1, moved=1) is None
    assert roof_of(H200, "gpu").floor_seconds(flops=989e12, moved=0) == pytest.approx(1.0)
    assert roof_of(H200, "gpu").floor_seconds(flops=0, moved=4.8e12) == pytest.approx(1.0)


def test_spreads() -> None:
    summary = Spread.of([5.0, 1.0, 3.0, 2.0, 4.0])
    assert (summary.median, summary.p10, summary.p90, summary.readings) == pytest.approx((3.0, 1.4, 4.6, 5))
    rates = summary.into(6.0)
    assert (rates.median, rates.p10, rates.p90) == (2.0, pytest.approx(6 / 4.6), pytest.approx(6 / 1.4))


@pytest.mark.parametrize(
    ("count", "seconds", "expected"),
    [(20, 1.0, [1] * 20), (5, 1e-3, [1] * 5), (40, 0.2, [3] * 13 + [1]), (100, 1e-3, [10] * 10)],
)
def test_groups_are_long_or_ten(count: int, seconds: float, expected: list[int]) -> None:
    assert group_sizes(count, seconds, 0.5) == expected


def test_a_reading_waits_once_for_a_group() -> None:
    calls: list[str] = []

    def call() -> str:
        calls.append("call")
        return "out"

    summary = readings(call, 30, lambda out: calls.append(f"wait for {out}"), least=10.0)
    assert summary.readings == 10
    assert calls[:2] == ["call", "wait for out"]
    assert calls[2:] == (["call"] * 3 + ["wait for out"]) * 10
    assert readings_in(call, lambda out: None, seconds=1e-6, groups=4).readings == 4
