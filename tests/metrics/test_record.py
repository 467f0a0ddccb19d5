"""Lines of metrics.jsonl: the documented keys, strict JSON, every step once; rates, peaks of devices, the time left."""

import json
import math

import numpy as np
import pytest

from megajax.metrics.record import METRICS, EvaluationRecord, loss_hex, read_metrics, to_json
from megajax.metrics.throughput import StepRate, mean_rates, peak_bf16_flops
from megajax.metrics.writers import JsonlWriter

pytestmark = pytest.mark.smoke

KEYS = [
    *("step", "loss", "loss_hex", "grad_norm", "lr", "consumed_samples", "consumed_tokens", "step_seconds"),
    *("tokens_per_second", "tokens_per_second_per_device", "tflops_per_device_causal", "tflops_per_device_full"),
    *("mfu_causal", "mfu_full", "loss_scale", "skipped"),
]


def strict(line: str) -> dict:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(line, parse_constant=refuse)


def test_a_step_has_the_documented_keys_in_order(step):
    rate = StepRate(devices=2, flops_per_token_causal=6e9, flops_per_token_full=8e9, peak_flops=1e12)
    loss = float(np.float32(0.1))
    values = strict(to_json(step(3, loss, rates=rate.rates(0.5, 64), loss_scale=1.0).line()))
    assert list(values) == KEYS
    assert values["loss"] == loss
    assert np.float32(float.fromhex(values["loss_hex"])) == np.float32(0.1)
    assert values["tokens_per_second"] == 128
    assert values["tokens_per_second_per_device"] == 64
    assert values["tflops_per_device_causal"] == pytest.approx(0.384)
    assert values["mfu_full"] == pytest.approx(0.512)
    assert values["skipped"] is False


def test_phases_memory_and_model_metrics_follow_the_fixed_keys_and_may_not_hide_them(step):
    line = step(1, metrics={"num_zeros": 3.0}, memory={"host": 2**30}, phases={"data_wait": 0.5}).line()
    assert list(line.items())[len(KEYS) :] == [("seconds_data_wait", 0.5), ("memory_host", 2**30), ("num_zeros", 3.0)]
    with pytest.raises(ValueError, match="'lr'"):
        step(1, metrics={"lr": 0.5}).line()


def test_unknown_values_are_null(step):
    values = strict(to_json(step(1).line()))
    unknown = ["tflops_per_device_causal", "tflops_per_device_full", "mfu_causal", "mfu_full", "loss_scale"]
    assert [name for name, value in values.items() if value is None] == unknown


@pytest.mark.parametrize(("loss", "text"), [(math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf")])
def test_non_finite_values_are_null_and_loss_hex_names_them(loss, text, step):
    values = strict(to_json(step(1, loss, grad_norm=math.inf, skipped=True).line()))
    assert values["loss"] is None
    assert values["grad_norm"] is None
    assert values["loss_hex"] == text
    assert values["skipped"] is True


def test_loss_hex_rounds_to_float32_and_keeps_every_bit():
    assert loss_hex(0.1) == float(np.float32(0.1)).hex() != (0.1).hex()
    neighbour = float(np.nextafter(np.float32(2.5), np.float32(3)))
    assert loss_hex(neighbour) != loss_hex(2.5)


def test_an_evaluation_line():
    record = EvaluationRecord(step=7, split="validation", loss=2.0)
    values = strict(to_json(record.line()))
    assert list(values) == ["step", "split", "loss", "loss_hex", "perplexity"]
    assert values["perplexity"] == pytest.approx(7.38905609893)
    assert strict(to_json(EvaluationRecord(step=7, split="test", loss=1e6).line()))["perplexity"] is None


def test_resume_keeps_every_step_once_and_the_earlier_attempt_aside(tmp_path, step):
    path = tmp_path / "metrics.jsonl"
    first = JsonlWriter(path)
    for number in range(1, 8):
        first.log(step(number, loss=1.0))
        if number % 2 == 0:
            first.log(EvaluationRecord(step=number, split="validation", loss=1.0))
    first.close()
    with path.open("a") as file:
        file.write('{"step": 8, "loss": 1.')  # a crash in the middle of a line

    second = JsonlWriter(path, start_step=4)
    assert second.superseded == 4
    second.log(EvaluationRecord(step=4, split="validation", loss=1.0))
    for number in range(5, 10):
        second.log(step(number, loss=2.0))
    second.log(EvaluationRecord(step=9, split="validation", loss=2.0))
    second.close()

    steps, evaluations = read_metrics(path)
    assert [(line["step"], line["loss"]) for line in steps] == [(n, 1.0 if n <= 4 else 2.0) for n in range(1, 10)]
    assert [line["step"] for line in evaluations] == [2, 4, 9]
    aside, aside_evaluations = read_metrics(tmp_path / "metrics.superseded.jsonl")
    assert [line["step"] for line in aside + aside_evaluations] == [5, 6, 7, 6]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["metrics.jsonl", "metrics.superseded.jsonl"]


def test_resume_after_a_line_without_its_newline(tmp_path, step):
    path = tmp_path / "metrics.jsonl"
    path.write_text(to_json(step(1).line()).rstrip("\n"))
    writer = JsonlWriter(path, start_step=1)
    writer.log(step(2))
    writer.close()
    assert [line["step"] for line in read_metrics(path)[0]] == [1, 2]
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


LARGE = ["1" + "0" * 400, "9" * 5000, "1e999", "-1e999", "Infinity", "NaN", str(2**63)]


@pytest.mark.parametrize("number", LARGE, ids=[text[:8] for text in LARGE])
@pytest.mark.parametrize("line", ['{"step": 1, "loss": %s}', '{"step": %s, "loss": 1.0}', '{"step": 1, "x": [[%s]]}'])
def test_lines_with_numbers_beyond_64_bits_are_skipped(tmp_path, number, line):
    path = tmp_path / "metrics.jsonl"
    path.write_text(to_json({"step": 1, "loss": 3.0}) + line % number + "\n" + to_json({"step": 2, "loss": 4.0}))
    assert [step["loss"] for step in read_metrics(path)[0]] == [3.0, 4.0]


def test_deeply_nested_lines_are_skipped_and_large_64_bit_numbers_are_read():
    assert METRICS.parse("[" * 100_000) is None and METRICS.parse('{"step": 1, "x": ' + "[" * 100_000) is None
    assert METRICS.parse(f'{{"step": 1, "n": {2**63 - 1}, "x": 1e308}}') == {"step": 1, "n": 2**63 - 1, "x": 1e308}


@pytest.mark.parametrize(
    ("kind", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA GB200", 2500),
        ("NVIDIA L40S", 362),
        ("NVIDIA L4", 121),
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
