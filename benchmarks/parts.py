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
    "peers": Part(SPEED, "training.peers:peers", "the same model and batch in PyTorch on the same GPU", prints=True),
    "processor": Part(SPEED, "training.processor:processor", "steps on one core relative to PyTorch", prints=True),
    "kernels": Part(SPEED, "kernels.measure:kernels", "single kernels: errors, times, share of the roofline",
                    prints=True),
    "xla_options": Part(SPEED, "training.xla_options:xla_options", "the train step with and without each XLA option",
                        prints=True),
    "schedules": Part(SPEED, "training.schedules:schedules", "the train step by each schedule of XLA", prints=True),
    "optimizer": Part(SPEED, "training.ratios:optimizer", "Muon relative to AdamW"),
    "adapters": Part(SPEED, "training.ratios:adapters", "DoRA relative to LoRA: step time and memory"),
    "recompute": Part(SPEED, "training.ratios:recompute", "each recomputation setting: step time and memory"),
    "recipes": Part(SPEED, "training.recipes:recipes", "losses by recipe of precision.matmul"),
    "freed_memory": Part(SPEED, "training.freed_memory:freed_memory", "CPU steps that keep the memory they free"),
    "rollouts": Part(SPEED, "training.rollouts:rollouts", "reinforcement learning, and the cost of equal sums"),
    "state_space": Part(SPEED, "training.ratios:state_space", "Mamba-2 in chunks relative to a sequential scan"),
    "delta_rule": Part(SPEED, "training.ratios:delta_rule", "gated delta nets in chunks relative to a sequential scan"),
    "compiled_kernels": Part(COMPILED, "kernels.compiled:compiled_kernels",
                             "layers: attention kernels, experts, Mamba-2, gated delta nets, recipes", prints=True),
    "compiled_peaks": Part(COMPILED, "planning.compiled_peaks:compiled_peaks",
                           "memory of the shipped configs, and the tables of docs", prints=True, own_file=True),
    "shipped_layouts": Part(COMPILED, "planning.shipped:shipped_layouts",
                            "speeds of shipped, searched and published layouts, and the table of docs", prints=True,
                            own_file=True),
    "program_audit": Part(COMPILED, "planning.program_audit:program_audit", "kernels and bytes of train steps"),
    "traffic": Part(COMPILED, "planning.program_audit:traffic", "bytes through memory by formula and compiled",
                    prints=True),
    "context": Part(COMPILED, "planning.context:context", "long rows with each strategy of context", prints=True),
    "moe_traffic": Part(COMPILED, "planning.expert_traffic:moe_traffic", "bytes that experts send, by way of dispatch",
                        prints=True),
    "exchanges": Part(COMPILED, "planning.exchanges:exchanges", "exposed time of exchanges with experts", prints=True),
    "planner_accuracy": Part(COMPILED, "planning.accuracy:planner_accuracy",
                             "the planner against published training speeds", prints=True),
    "recipe_plans": Part(COMPILED, "planning.recipes:recipe_plans", "predicted speeds by recipe of precision.matmul"),
    "predict": Part(COMPILED, "gpu.predict:predict", "predictions for both scripts, into benchmarks/predictions.json",
                    prints=True, own_file=True),
    "data": Part(DATA, "data.loading:data", "index, reading, batching, packing"),
    "streams": Part(DATA, "data.streams:streams", "rows of streamed Parquet beside datasets and torch"),
    "masked_data": Part(DATA, "data.loading:masked_data", "rows for BERT and T5 per second and core"),
    "context_balance": Part(DATA, "data.balance:context_balance", "balance of rows over context and data groups",
                            prints=True),
    "images": Part(DATA, "data.images:images", "decoding and augmenting images"),
    "preprocessing": Part(DATA, "data.preprocess:preprocessing", "preprocessing, and the tokenizers package"),
    "checkpoint": Part(RUNS, "checkpoints.saves:checkpoint", "seconds of saves and restores"),
    "local_checkpoints": Part(RUNS, "checkpoints.saves:local_checkpoints", "local checkpoints beside training"),
    "integrity": Part(RUNS, "checkpoints.saves:integrity", "hashes of the state and recomputed steps"),
    "restores": Part(RUNS, "checkpoints.restores:restores", "bytes that a restore reads"),
    "convert": Part(RUNS, "checkpoints.convert:convert", "converting a Hugging Face model to a run and back"),
    "kills": Part(RUNS, "faults.reliability:kills", "kills of a saving process and of a rank"),
    "restarts": Part(RUNS, "faults.reliability:restarts", "time from the death of a rank to the next step"),
    "watchdog": Part(RUNS, "faults.reliability:watchdog", "time from a rank that stops to the end of the gang"),
    "leaks": Part(RUNS, "faults.reliability:leaks", "memory and descriptors over many steps and saves"),
    "survival": Part(RUNS, "faults.survival:survival", "one run through a kill, a hang, a full disk and damage"),
    "inference": Part(TEXT, "inference.generation:inference", "speed relative to memory bandwidth and transformers"),
    "host_share": Part(TEXT, "inference.host_share:host_share", "time that a device waits for the engine"),
    "equality": Part(TEXT, "inference.equality:equality", "log-probabilities of an engine beside those of its run"),
    "drafting": Part(TEXT, "inference.drafting:drafting", "steps and time of each kind of draft"),
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
    "layouts": Part(CHECKS, "planning.layouts:layouts", "33 layouts against one device", prints=True),
    "context_layouts": Part(CHECKS, "planning.layouts:context_layouts", "rows over context against one device",
                            prints=True),
}  # fmt: skip
