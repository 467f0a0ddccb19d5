"""The steps of gpu_check with their time limits, in lists that each fit into one call of ten minutes.

Each step has sizes for a GPU and tiny sizes for a CPU; both run the same command. In a command, {json} is the file of
the step's figures, {folder} its folder, and {out} the folder of results. Imports neither jax nor megajax.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

type Kind = Literal["device", "mfu", "trace", "tests", "kernels", "calibrate", "experts", "schedules"]

BUDGET = 570
"""Seconds of one call: commands on a lent machine are ended after 600."""
TRACE = "{out}/llama_3b.xplane.pb.gz"
BENCHMARKS = ("-m", "benchmarks")


@dataclass(frozen=True, kw_only=True)
class Step:
    """One program and its time limit."""

    name: str
    kind: Kind
    """Selects its figures, by `comparison.READERS`."""
    limit: int
    """Seconds after which it is interrupted; it is killed ten seconds later."""
    program: tuple[str, ...]
    """Arguments of Python."""
    real: tuple[str, ...] = ()
    """Further arguments on a GPU."""
    tiny: tuple[str, ...] = ()
    """Further arguments of a dry run on a CPU."""
    devices: int = 1
    """Devices that its prediction is for."""

    def arguments(self, *, tiny: bool) -> tuple[str, ...]:
        """The arguments of Python."""
        return (*self.program, *(self.tiny if tiny else self.real))

    def command(self, python: str, places: Mapping[str, str], *, tiny: bool) -> list[str]:
        """The command line, with {json} and so on replaced."""
        command = [python, *self.arguments(tiny=tiny)]
        for name, place in places.items():
            command = [word.replace(f"{{{name}}}", place) for word in command]
        return command


def _mfu(name: str, limit: int, config: str, *sizes: str, shared: tuple[str, ...] = (), tiny: str = "debug") -> Step:
    return Step(
        name=f"mfu_{name}",
        kind="mfu",
        limit=limit,
        program=(*BENCHMARKS, "mfu", "--json={json}", *shared),
        # A step takes about two seconds, and there are six besides the timed ones.
        real=(f"--config=bench.py:{config}", "--steps=6", *sizes),
        tiny=(f"--config=bench.py:{tiny}", "--steps=2", "--precision.compute=bfloat16"),
    )


def _kernels(part: str, limit: int) -> Step:
    return Step(
        name=f"kernels_{part}",
        kind="kernels",
        limit=limit,
        program=(*BENCHMARKS, "kernels", f"--parts={part}", "--json={json}"),
        real=("--seconds=0.2",),
        tiny=("--seconds=0.02",),
    )


def _tests(name: str, limit: int, *folders: str) -> Step:
    command = ("-m", "pytest", "-m", "gpu", "-vv", "-p", "no:cacheprovider", f"--junitxml={{folder}}/tests_{name}.xml")
    return Step(name=f"tests_{name}", kind="tests", limit=limit, program=(*command, *folders))


def _long(rows: int) -> tuple[str, ...]:
    """Rows of 8192 tokens, with `rows` of them in a microbatch."""
    return "--model.sequence_length=8192", f"--batch.micro_size={rows}", f"--batch.global_size={4 * rows}"


def experts(devices: int) -> Step:
    """Gradients by every way to dispatch tokens; devices: those of one process of a dry run."""
    return Step(
        name="experts",
        kind="experts",
        limit=150,
        program=(*BENCHMARKS, "expert_gradients", "--json={json}"),
        real=FOUR_LAYERS,
        tiny=("--config=qwen3_moe.py:debug", "--model.stack.repeats=1", f"--devices=cpu:{devices}"),
    )


FOUR_LAYERS = ("--config=qwen3_moe.py", "--model.stack.repeats=4", "--model.recompute=full")
"""Of Qwen3-30B-A3B."""
DEVICE = Step(name="device", kind="device", limit=20, program=(*BENCHMARKS, "device", "--json={json}"))
TRACE_SUMMARY = Step(
    name="trace_llama_3b", kind="trace", limit=10, program=("-m", "megajax.tools.trace", TRACE, "--json={json}")
)
CALIBRATE = Step(
    name="calibrate",
    kind="calibrate",
    limit=110,
    program=(*BENCHMARKS, "calibrate", "--json={json}"),
    tiny=("--tiny", "--seconds=0.02"),
)
SCHEDULES = Step(
    name="schedules",
    kind="schedules",
    limit=120,
    program=(*BENCHMARKS, "schedules", "--json={json}"),
    real=("--config=bench.py:llama_1b", "--steps=6"),
    tiny=("--config=bench.py:debug", "--steps=1", "--devices=cpu:2"),
)
ROWS_OF_2048 = ("--model.sequence_length=2048", "--batch.micro_size=16", "--batch.global_size=64")

LISTS: Mapping[str, tuple[Step, ...]] = {
    "first": (
        DEVICE,
        _mfu("llama_3b_4096", 140, "llama_3b", shared=(f"--trace={TRACE}",)),
        TRACE_SUMMARY,
        _mfu("llama_1b_4096", 80, "llama_1b"),
        _tests("training", 100, "tests", "--ignore=tests/kernels"),
    ),
    "second": (
        _mfu("llama_3b_4096_triton", 120, "llama_3b", shared=("--xla=xla_gpu_enable_triton_gemm=true",)),
        _kernels("attention", 140),
        CALIBRATE,
        _kernels("matmul", 50),
        _kernels("loss", 60),
        _kernels("norm", 30),
    ),
    "third": (
        _tests("kernels", 90, "tests/kernels"),
        _mfu("llama_3b_4096_fp8", 120, "llama_3b", shared=("--precision.matmul=Fp8Current",)),
        _mfu("llama_8b_18_layers_8192", 110, "llama_8b_18_layers"),
        _mfu("gpt_1_3b_2048", 80, "gpt_1_3b", tiny="debug_gpt"),
        _mfu("llama_3b_8192", 100, "llama_3b", *_long(2)),
        _mfu("llama_1b_4096_recompute_none", 70, "llama_1b", shared=("--model.recompute=none",)),
    ),
    "more": (
        _mfu("gpt_1_3b_8192", 90, "gpt_1_3b", *_long(4), tiny="debug_gpt"),
        _mfu("llama_1b_2048", 80, "llama_1b", *ROWS_OF_2048),
        _mfu("llama_1b_8192", 90, "llama_1b", *_long(4)),
    ),
    "layers": (experts(2), SCHEDULES, _kernels("faults", 120), _kernels("grouped", 120)),
    "recurrences": (_kernels("delta_rule", 240), _kernels("state_space", 60)),
    "recipes": (
        _kernels("recipes", 90),
        *(
            _mfu(f"llama_3b_4096_{name.lower()}", 115, "llama_3b", shared=(f"--precision.matmul={name}",))
            for name in ("Fp8Delayed", "Fp8Blocks", "Mxfp8", "Nvfp4")
        ),
    ),
}
"""The most important steps first. Three calls fit into the 30 minutes of a lent machine."""

ALL = tuple(step for steps in LISTS.values() for step in steps)
