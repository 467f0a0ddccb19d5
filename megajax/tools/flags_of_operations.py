"""Megatron-LM's flags about checkpoints, the loop, logging, profiling and inference: one row each."""

from megajax.tools.flags import Flag, flag, needless, refused, to
from megajax.tools.megatron_run import checkpoint, logging, profile, resilience

ORBAX = "checkpoints are one format, written by all devices and read onto any layout"
NO_WARM_START = "only whole states are loaded in this version: model, optimizer and step"
NO_LOCAL = "checkpoints on local disks are not in this version"
METRICS = "metrics.jsonl has it for every step"
GENERATION = "no part of training"
ONE_LOGGER = "a service of NVIDIA's own"
GARBAGE = "Python's garbage collector does not hold the devices up: steps run ahead of it"

CHECKPOINTS: tuple[Flag, ...] = (
    flag("save", str, to("run_dir", by=checkpoint)),
    flag("load", str, to("checkpoint.load", by=checkpoint)),
    flag("save-interval", int, to("checkpoint.every", by=checkpoint), also=("persistent-save-interval",)),
    flag("save-retain-interval", int, to("checkpoint.keep_every", "checkpoint.keep_last", by=checkpoint)),
    flag("most-recent-k", int, to("checkpoint.keep_last", by=checkpoint), default=-1),
    flag("pretrained-checkpoint", str, refused(NO_WARM_START)),
    flag("ckpt-step", int, to("checkpoint.step")),
    flag("finetune", bool, refused(NO_WARM_START)),
    flag("no-save-optim", bool, refused("checkpoints are whole")),
    flag("no-save-rng", bool, needless("random numbers follow from seed, step, row and layer")),
    flag("no-load-optim", bool, refused(NO_WARM_START)),
    flag("no-load-rng", bool, needless("random numbers follow from seed, step, row and layer")),
    flag("use-checkpoint-args", bool, refused("a run is its config; the checkpoint's lies in its run folder")),
    flag("use-mp-args-from-checkpoint-args", bool, refused("a checkpoint is read onto the config's layout")),
    flag("no-use-tokenizer-model-from-checkpoint-args", bool, needless("the tokenizer is always the config's")),
    flag(
        "exit-on-missing-checkpoint",
        bool,
        needless("a --load that finds nothing is always an error; refused where --load is --save"),
        default=False,
    ),
    flag("ckpt-format", str, needless(ORBAX), default="torch_dist"),
    flag("dist-ckpt-format", str, needless(ORBAX)),
    flag("use-dist-ckpt", bool, needless(ORBAX)),
    flag("auto-detect-ckpt-format", bool, needless(ORBAX)),
    flag("ckpt-convert-format", str, refused("checkpoints of Megatron-LM are not converted in this version")),
    flag("ckpt-convert-save", str, refused("checkpoints of Megatron-LM are not converted in this version")),
    flag("async-save", bool, to("checkpoint.asynchronous")),
    flag("use-persistent-ckpt-worker", bool, needless("checkpoints are written by threads of the run")),
    flag("ckpt-fully-parallel-save", bool, needless(ORBAX)),
    flag("ckpt-fully-parallel-load", bool, needless(ORBAX)),
    flag("no-ckpt-fully-parallel-save", bool, needless(ORBAX)),
    flag("ckpt-assume-constant-structure", bool, needless(ORBAX)),
    flag("dist-ckpt-strictness", str, needless("what does not fit is always an error"), default="assume_ok_unexpected"),
    flag("dist-ckpt-optim-fully-reshardable", bool, needless(ORBAX)),
    flag("distrib-optim-fully-reshardable-mem-efficient", bool, needless(ORBAX)),
    flag("non-persistent-save-interval", int, refused(NO_LOCAL)),
    flag("non-persistent-ckpt-type", str, refused(NO_LOCAL)),
    flag("non-persistent-global-ckpt-dir", str, refused(NO_LOCAL)),
    flag("non-persistent-local-ckpt-dir", str, refused(NO_LOCAL)),
    flag("non-persistent-local-ckpt-algo", str, refused(NO_LOCAL)),
    flag("replication", bool, refused(NO_LOCAL)),
    flag("replication-jump", int, refused(NO_LOCAL)),
    flag("replication-factor", int, refused(NO_LOCAL), default=2),
)

LOOP: tuple[Flag, ...] = (
    flag("seed", int, to("seed"), default=1234),
    flag("exit-interval", int, to("resilience.exit_after_steps", by=resilience)),
    flag("exit-duration-in-mins", float, to("resilience.exit_after_minutes")),
    flag("exit-signal-handler", bool, to("resilience.save_on_signal")),
    flag("exit-signal", str, needless("SIGTERM, SIGINT and SIGUSR1 all save and end a run")),
    flag("iterations-to-skip", list, to("resilience.skip_steps", by=resilience), default=[]),
    flag("check-for-spiky-loss", bool, to("resilience.spike_factor", by=resilience), default=False),
    flag("check-for-large-grads", bool, refused("set resilience.largest_norm: updates above it are not made")),
    flag("no-check-for-nan-in-loss-and-grad", bool, to("resilience.stop_on_nonfinite", by=resilience), default=False),
    flag("check-for-nan-in-loss-and-grad", bool, needless("it is always checked")),
    flag("rerun-mode", str, to("resilience.rerun", by=resilience), default="validate_results"),
    flag("error-injection-rate", int, refused("name faults and steps: resilience.inject")),
    flag("error-injection-type", str, refused("name faults and steps: resilience.inject")),
    flag(
        "check-weight-hash-across-dp-replicas-interval",
        int,
        refused("copies are not compared in this version"),
    ),
    flag("grad-norm-skip-threshold", float, to("resilience.largest_norm")),
    flag("log-straggler", bool, refused("slow devices are not looked for in this version")),
    flag("manual-gc", bool, needless(GARBAGE)),
    flag("manual-gc-interval", int, needless(GARBAGE)),
    flag("no-manual-gc-eval", bool, needless(GARBAGE)),
    flag("deterministic-mode", bool, to("xla.deterministic"), default=False),
    flag("train-sync-interval", int, needless("at most a few steps are in flight")),
    flag("adlr-autoresume", bool, refused("a service of one cluster; SIGTERM saves and ends a run")),
    flag("adlr-autoresume-interval", int, refused("a service of one cluster; SIGTERM saves and ends a run")),
)

LOGGING: tuple[Flag, ...] = (
    flag("log-interval", int, to("logging.every", by=logging), default=100),
    flag("tensorboard-dir", str, to("logging.tensorboard", by=logging)),
    flag("tensorboard-log-interval", int, needless("TensorBoard gets every step"), default=1),
    flag("tensorboard-queue-size", int, needless("TensorBoard gets every step")),
    flag("wandb-project", str, to("logging.wandb.project", by=logging)),
    flag("wandb-exp-name", str, to("logging.wandb.name", by=logging)),
    flag("wandb-save-dir", str, needless("W&B's files lie in the run's folder")),
    flag("wandb-entity", str, needless("W&B reads its environment variable WANDB_ENTITY")),
    flag("log-throughput", bool, needless(METRICS)),
    flag("log-progress", bool, needless(METRICS)),
    flag("log-learning-rate-to-tensorboard", bool, needless(METRICS)),
    flag("log-batch-size-to-tensorboard", bool, needless(METRICS)),
    flag("log-loss-scale-to-tensorboard", bool, needless(METRICS)),
    flag("no-log-loss-scale-to-tensorboard", bool, needless(METRICS)),
    flag("no-log-learnig-rate-to-tensorboard", bool, needless(METRICS)),
    flag("log-world-size-to-tensorboard", bool, needless("the banner and config.yaml have it")),
    flag("log-validation-ppl-to-tensorboard", bool, needless("an evaluation logs its loss; perplexity is exp of it")),
    flag("log-energy", bool, refused("energy is not measured in this version")),
    flag("log-timers-to-tensorboard", bool, needless(METRICS)),
    flag("log-memory-to-tensorboard", bool, needless(METRICS)),
    flag("timing-log-level", int, needless("times between steps are logged; profile.steps looks into steps")),
    flag("timing-log-option", str, needless("least and largest over processes are logged"), default="minmax"),
    flag("no-barrier-with-level-1-timing", bool, needless("nothing waits for a timer")),
    flag("logging-level", int, needless("a run prints what the person at the terminal needs")),
    flag("no-one-logger", bool, needless(ONE_LOGGER)),
    flag("enable-one-logger", bool, needless(ONE_LOGGER)),
    flag("one-logger-project", str, needless(ONE_LOGGER)),
    flag("one-logger-run-name", str, needless(ONE_LOGGER)),
    flag("enable-ft-package", bool, refused("megajax.launch supervises runs: docs/launch.md")),
    flag("config-logger-dir", str, needless("config.yaml in the run's folder has all settings")),
)

PROFILING: tuple[Flag, ...] = (
    flag("profile", bool, to("profile.steps", by=profile), default=False),
    flag("use-pytorch-profiler", bool, needless("there is one profiler, jax's; TensorBoard and xprof show its traces")),
    flag("profile-step-start", int, to("profile.steps", by=profile), default=10),
    flag("profile-step-end", int, to("profile.steps", by=profile), default=12),
    flag("profile-ranks", list, to("profile.processes", by=profile), default=["0"]),
    flag("record-memory-history", bool, refused("no history of allocations: megajax.plan says what a step holds")),
    flag("memory-snapshot-path", str, refused("no history of allocations: megajax.plan says what a step holds")),
)

INFERENCE: tuple[Flag, ...] = (
    flag("inference-dynamic-batching-block-size", int, needless(GENERATION), default=256),
    flag("inference-dynamic-batching-buffer-size-gb", float, needless(GENERATION), default=40.0),
    flag("inference-dynamic-batching-max-requests", int, needless(GENERATION)),
    flag("inference-dynamic-batching-max-tokens", int, needless(GENERATION)),
    flag("inference-max-requests", int, needless(GENERATION), default=8),
    flag("inference-max-seq-length", int, needless(GENERATION), default=2560),
    flag("num-speculative-tokens", int, needless(GENERATION)),
    flag("temperature", float, needless(GENERATION), default=1.0),
    flag("top_k", int, needless(GENERATION), default=1),
    flag("top_p", float, needless(GENERATION), default=0.0),
    flag("num-tokens-to-generate", int, needless(GENERATION)),
    flag("return-log-probs", bool, needless(GENERATION)),
    flag("stop-words", list, needless(GENERATION)),
)

OPERATIONS_FLAGS = (*CHECKPOINTS, *LOOP, *LOGGING, *PROFILING, *INFERENCE)
