"""The parts of `python -m benchmarks`, one row each."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Part:
    """A measurement. Its function's keyword arguments are the options, and its docstring is the help.

    The function returns figures, or yields their states; "wrong" in the figures makes the exit code 1. An argument
    `cfg` is the config of --config and --setting=value.
    """

    group: str
    target: str
    """"module:function" in benchmarks/."""
    line: str
    prints: bool = False
    """Whether it prints a report itself; the figures of the others are printed as JSON."""
    processes: bool = False
    """Whether it may run in several processes, as training does."""
    own_file: bool = False
    """Whether it writes its files itself and has no --json."""


SPEED, COMPILED, DATA, RUNS = "speed", "compiled for virtual GPUs, or by formula", "data", "checkpoints and faults"
TEXT, CHECKS = "text generation", "checks of a machine, and of results"

PARTS = {
    "mfu": Part(SPEED, "training.train_speed:mfu", "the shipped train step: tokens/s, TFLOP/s, MFU, memory, kernels",
                prints=True, processes=True),
    "processor": Part(SPEED, "training.processor:processor", "steps on one core relative to PyTorch", prints=True),
    "record": Part(SPEED, "training.record:record", "time until a file of settings has a validation loss of 1.55"),
    "kernels": Part(SPEED, "kernels.measure:kernels", "single kernels: errors, times, share of the roofline",
                    prints=True),
    "xla_options": Part(SPEED, "training.xla_options:xla_options", "the train step with and without each XLA option",
                        prints=True),
    "schedules": Part(SPEED, "training.schedules:schedules", "the train step by each schedule of XLA", prints=True),
    "compiled_kernels": Part(COMPILED, "kernels.compiled:compiled_kernels",
                             "layers: gated delta nets, recipes of precision.matmul", prints=True),
    "compiled_peaks": Part(COMPILED, "planning.compiled_peaks:compiled_peaks",
                           "memory of the shipped configs, and the tables of docs", prints=True, own_file=True),
    "shipped_layouts": Part(COMPILED, "planning.shipped:shipped_layouts",
                            "speeds of shipped, searched and published layouts, and the table of docs", prints=True,
                            own_file=True),
    "program_audit": Part(COMPILED, "planning.program_audit:program_audit", "kernels and bytes of train steps"),
    "traffic": Part(COMPILED, "planning.program_audit:traffic", "bytes through memory by formula and compiled",
                    prints=True),
    "context": Part(COMPILED, "planning.context:context", "long rows with each strategy of context", prints=True),
    "planner_accuracy": Part(COMPILED, "planning.accuracy:planner_accuracy",
                             "the planner against published training speeds", prints=True),
    "predict": Part(COMPILED, "gpu.predict:predict", "predictions for both scripts, into benchmarks/predictions.json",
                    prints=True, own_file=True),
    "data": Part(DATA, "data.loading:data", "index, reading, batching, packing"),
    "checkpoint": Part(RUNS, "checkpoints.saves:checkpoint", "seconds of saves and restores"),
    "kills": Part(RUNS, "faults.reliability:kills", "kills of a saving process and of a rank"),
    "restarts": Part(RUNS, "faults.reliability:restarts", "time from the death of a rank to the next step"),
    "watchdog": Part(RUNS, "faults.reliability:watchdog", "time from a rank that stops to the end of the gang"),
    "leaks": Part(RUNS, "faults.reliability:leaks", "memory and descriptors over many steps and saves"),
    "inference": Part(TEXT, "inference.generation:inference", "speed relative to memory bandwidth, and with drafts"),
    "serving_load": Part(TEXT, "inference.serving_load:serving_load", "many clients against a running server",
                         prints=True),
    "device": Part(CHECKS, "gpu.check:device", "the device, versions and missing packages"),
    "gpu_check": Part(CHECKS, "gpu.check:gpu_check", "the main benchmarks on one GPU: gpu_check.sh",
                      prints=True, own_file=True),
    "node_check": Part(CHECKS, "gpu.node_check:node_check", "layouts on all devices of a node: node_check.sh",
                       prints=True),
    "calibrate": Part(CHECKS, "gpu.calibrate:calibrate", "the constants of the planner's cost model", prints=True),
    "expert_gradients": Part(CHECKS, "training.expert_gradients:expert_gradients",
                             "gradients by every way to dispatch tokens to experts", prints=True, processes=True),
    "layouts": Part(CHECKS, "planning.layouts:layouts", "models on layouts against one device", prints=True),
}  # fmt: skip
