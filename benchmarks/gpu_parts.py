"""The parts of gpu_check.sh with their time limits, in lists that each fit into one call of ten minutes.

Each part has sizes for a GPU and tiny sizes for a CPU; both run the same commands. In a command, {json} is the part's
file of figures, {folder} its folder, {out} the folder of results, and {torch_python} the Python with torch. This module
imports neither jax nor megajax.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

type Kind = Literal["device", "mfu", "trace", "peers", "tests", "kernels", "calibrate", "experts"]

BUDGET = 570
"""Seconds of one call: a command on a lent machine is ended after 600."""
TORCH_SECONDS = 200
"""Of the 300 that a comparison has, the most that PyTorch may take."""
TRACE = "{out}/llama_3b.xplane.pb.gz"


@dataclass(frozen=True, kw_only=True)
class Part:
    """One program and its time limit."""

    name: str
    kind: Kind
    """Which figures it has: see `comparison.measured_figures`."""
    limit: int
    """Seconds after which it is interrupted, and ten seconds later killed."""
    program: tuple[str, ...]
    """Words after the name of Python, at any size."""
    real: tuple[str, ...] = ()
    """Further ones on a GPU."""
    tiny: tuple[str, ...] = ()
    """Further ones for a dry run on a CPU."""

    def arguments(self, *, tiny: bool) -> tuple[str, ...]:
        """The command after the name of Python."""
        return (*self.program, *(self.tiny if tiny else self.real))

    def command(self, python: str, places: Mapping[str, str], *, tiny: bool) -> list[str]:
        """With everything put in."""
        command = [python, *self.arguments(tiny=tiny)]
        for name, place in places.items():
            command = [word.replace(f"{{{name}}}", place) for word in command]
        return command


def _mfu(name: str, limit: int, config: str, *sizes: str, shared: tuple[str, ...] = (), tiny: str = "debug") -> Part:
    return Part(
        name=f"mfu_{name}",
        kind="mfu",
        limit=limit,
        program=("benchmarks/mfu.py", "--json={json}", *shared),
        # A step takes about two seconds, and six besides those that are timed.
        real=(f"--config=bench.py:{config}", "--steps=6", *sizes),
        tiny=(f"--config=bench.py:{tiny}", "--steps=2", "--precision.compute=bfloat16"),
    )


def _peers(name: str, config: str, tiny: str = "debug") -> Part:
    # After so long no variant is begun; after twice as long the last is ended.
    seconds = f"--torch-seconds={TORCH_SECONDS // 2}"
    return Part(
        name=f"peers_{name}",
        kind="peers",
        limit=300,
        program=("benchmarks/peers.py", "--json={json}", "--torch-python={torch_python}"),
        real=(f"--config=bench.py:{config}", "--steps=6", seconds),
        tiny=(f"--config=bench.py:{tiny}", "--steps=2", "--torch-seconds=300", "--devices=cpu"),
    )


def _kernels(part: str, limit: int) -> Part:
    return Part(
        name=f"kernels_{part}",
        kind="kernels",
        limit=limit,
        program=("benchmarks/kernels.py", f"--parts={part}", "--json={json}"),
        real=("--seconds=0.2",),
        tiny=("--seconds=0.02",),
    )


def _tests(name: str, limit: int, *folders: str) -> Part:
    command = (
        "-m",
        "pytest",
        "-m",
        "gpu",
        "-vv",
        "-p",
        "no:cacheprovider",
        "--junitxml={folder}/" + f"tests_{name}.xml",
    )
    return Part(name=f"tests_{name}", kind="tests", limit=limit, program=(*command, *folders))


def _long(rows: int) -> tuple[str, ...]:
    """Rows of 8192 tokens, and how many a microbatch has."""
    return "--model.sequence_length=8192", f"--batch.micro_size={rows}", f"--batch.global_size={4 * rows}"


LISTS: Mapping[str, tuple[Part, ...]] = {
    "first": (
        Part(name="device", kind="device", limit=20, program=("benchmarks/device.py", "--json={json}")),
        _mfu("llama_3b_4096", 140, "llama_3b", shared=(f"--trace={TRACE}",)),
        Part(
            name="trace_llama_3b",
            kind="trace",
            limit=10,
            program=("-m", "megajax.tools.trace", TRACE, "--json={json}"),
        ),
        _peers("llama_1b_4096", "llama_1b"),
        _tests("training", 100, "tests", "--ignore=tests/kernels"),
    ),
    "second": (
        _mfu("llama_3b_4096_triton", 120, "llama_3b", shared=("--xla=xla_gpu_enable_triton_gemm=true",)),
        _kernels("attention", 140),
        Part(
            name="calibrate",
            kind="calibrate",
            limit=110,
            program=("benchmarks/calibrate.py", "--out={json}"),
            tiny=("--tiny", "--seconds=0.02"),
        ),
        _kernels("matmul", 50),
        _kernels("loss", 60),
        _kernels("norm", 30),
    ),
    "third": (
        _tests("kernels", 90, "tests/kernels"),
        _mfu("llama_3b_4096_fp8", 120, "llama_3b", shared=("--precision.fp8=Fp8",)),
        _mfu("llama_8b_18_layers_8192", 110, "llama_8b_18_layers"),
        _mfu("gpt_1_3b_2048", 80, "gpt_1_3b", tiny="debug_gpt"),
        _mfu("llama_3b_8192", 100, "llama_3b", *_long(2)),
        _mfu("llama_1b_4096_recompute_none", 70, "llama_1b", shared=("--model.recompute=none",)),
    ),
    "more": (
        _peers("gpt_1_3b_2048", "gpt_1_3b", tiny="debug_gpt"),
        _mfu("gpt_1_3b_8192", 90, "gpt_1_3b", *_long(4), tiny="debug_gpt"),
        _mfu("llama_1b_2048", 80, "llama_1b", "--model.sequence_length=2048", "--batch.micro_size=16",
             "--batch.global_size=64"),
        _mfu("llama_1b_8192", 90, "llama_1b", *_long(4)),
    ),
    "layers": (
        Part(
            name="experts",
            kind="experts",
            limit=150,
            program=("benchmarks/expert_ways.py", "--json={json}"),
            real=("--config=qwen3_moe.py", "--model.stack.repeats=4", "--model.recompute=full"),
            tiny=("--config=mixtral.py:debug", "--model.stack.repeats=1", "--devices=cpu:2"),
        ),
        _kernels("faults", 120),
        _kernels("grouped", 120),
        _kernels("state_space", 60),
    ),
}  # fmt: skip
"""The most telling parts first. Three calls fit into the 30 minutes of a lent machine; the others are for longer."""

ALL = tuple(part for parts in LISTS.values() for part in parts)
