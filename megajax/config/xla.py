"""The compiler options of programs for GPUs: the one place they are named, with what each is for.

They are handed to the compile of one program, not to the process: an option that the compiler does not know is an error
of that compile, where an unknown word in the environment would end the process.
"""

from typing import NamedTuple


class Option(NamedTuple):
    """One option of XLA."""

    name: str
    value: bool | int
    why: str


GPU = (
    Option(
        "xla_gpu_enable_latency_hiding_scheduler",
        True,
        "orders the program so that collectives run beside matmuls",
    ),
    Option(
        "xla_gpu_experimental_parallel_collective_overlap_limit",
        6,
        "lets what travels between pipeline stages stay under way during a loop over layers that has collectives too",
    ),
    Option(
        "xla_gpu_all_reduce_combine_threshold_bytes",
        2**20,
        "keeps the reductions over stages apart: joined into one, they would all wait for the last to be ready",
    ),
)
"""For every train step on GPUs, there or absent."""

ABSENT_GPU = (Option("xla_gpu_autotune_level", 0, "there is no device to time kernels on"),)
"""Beside those of GPU, for compiling where the GPUs are absent."""


def compiler_options(*options: Option) -> dict[str, bool | int]:
    """For `jax.stages.Lowered.compile(compiler_options=...)`."""
    return {option.name: option.value for option in options}
