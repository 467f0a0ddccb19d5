"""The settings of a run except model, layout and data, from Megatron-LM's flags and defaults."""

from itertools import pairwise
from pathlib import Path
from typing import Any

from megajax.checkpoint.config import LocalConfig
from megajax.config.compose import problems_of
from megajax.interop.megatron.flags.layout import model_devices
from megajax.interop.megatron.flags.model import positions
from megajax.interop.megatron.flags.reading import Arguments, Settings, needed
from megajax.metrics.config import WandbConfig
from megajax.optim.config import AdamWConfig, GroupConfig, LionConfig, MuonConfig, OptimizerConfig, SGDConfig
from megajax.precision.config import (
    ConstantScaleConfig,
    DynamicScaleConfig,
    Fp8BlocksConfig,
    Fp8CurrentConfig,
    Fp8DelayedConfig,
    MatmulConfig,
    Mxfp8Config,
    Nvfp4Config,
)
from megajax.training.config import LinearRampConfig, RampConfig, StepRampConfig

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def _identity(*names: str) -> dict[str, str]:
    """Values with the same name in both libraries."""
    return {name: name for name in names}


def precision(args: Arguments) -> Settings:
    """Dtypes and loss scale."""
    compute = "float16" if args["fp16"] else "bfloat16" if args["bf16"] else "float32"
    settings: dict[str, Any] = {"precision.compute": compute}
    if args["grad-reduce-in-bf16"] and args["ddp-reduce-scatter-with-fp32-accumulation"]:
        args.refuse("ddp-reduce-scatter-with-fp32-accumulation", "sums have the dtype of communication: without "
                    "--grad-reduce-in-bf16 both are float32")  # fmt: skip
    if args["grad-reduce-in-bf16"]:
        settings["precision.gradients"] = "bfloat16"
    elif args["fp16"] and not args["accumulate-allreduce-grads-in-fp32"]:
        args.remark("fp16", "gradients are accumulated and reduced in float32 here, not in float16")
    if args["use-megatron-fsdp"]:
        settings |= _fsdp_gradients(args)
    # A scale of 0 means none, as in Megatron-LM: float16 has its dynamic one.
    if args["loss-scale"]:
        settings["precision.loss_scale"] = ConstantScaleConfig(value=args["loss-scale"])
    elif args["fp16"] and args.is_given("initial-loss-scale", "min-loss-scale", "loss-scale-window", "hysteresis"):
        settings["precision.loss_scale"] = DynamicScaleConfig(
            initial=args["initial-loss-scale"],
            floor=args["min-loss-scale"],
            window=int(args["loss-scale-window"]),
            hysteresis=args["hysteresis"],
        )
    if (recipe := _recipe(args)) is not None:
        settings["precision.matmul"] = recipe
    return settings


def _fsdp_gradients(args: Arguments) -> Settings:
    """The dtype in which gradients are added up and reduced."""
    main, sent = args["megatron-fsdp-main-grads-dtype"], args["megatron-fsdp-grad-comm-dtype"]
    for name in ("megatron-fsdp-main-grads-dtype", "megatron-fsdp-grad-comm-dtype"):
        if args[name] not in ("fp32", "bf16", "auto"):
            args.refuse(name, "gradients are added up and reduced in float32 or bfloat16: precision.gradients")
    if sent != main and sent != "auto":
        args.remark("megatron-fsdp-grad-comm-dtype", "gradients are reduced in the dtype that they are added up in")
    return {"precision.gradients": "bfloat16"} if main == "bf16" else {}


def _recipe(args: Arguments) -> MatmulConfig | None:
    """The recipe of the layers' matmuls."""
    switch_format = "hybrid" if args["fp8-hybrid"] else "e4m3" if args["fp8-e4m3"] else None
    fp8_format, recipe = args["fp8-format"] or switch_format, args["fp8-recipe"]
    ends = (args["num-layers-at-start-in-bf16"], args["num-layers-at-end-in-bf16"])
    ends = ends if args["first-last-layers-bf16"] else (0, 0)
    layers: dict[str, Any] = {"first_layers": ends[0], "last_layers": ends[1]}
    if args["fp4-format"] is not None:
        args.one_of("fp4-format", {"e2m1": None})
        args.one_of("fp4-recipe", {"nvfp4": None})
        return Nvfp4Config(**layers)
    if fp8_format is None:
        return None
    if fp8_format not in ("hybrid", "e4m3"):
        args.problem("fp8-format", f"expected hybrid or e4m3, got {fp8_format}")
        return None
    shared: dict[str, Any] = {"format": fp8_format, **layers}
    if recipe == "delayed":
        algorithm = args.one_of("fp8-amax-compute-algo", _identity("most_recent", "max"))
        history, margin = args["fp8-amax-history-len"], args["fp8-margin"]
        return Fp8DelayedConfig(history=history, algorithm=algorithm, margin=margin, **shared)
    kinds = {"tensorwise": Fp8CurrentConfig, "blockwise": Fp8BlocksConfig, "mxfp8": Mxfp8Config}
    if recipe not in kinds:
        args.refuse("fp8-recipe", f"{recipe}: supported are delayed, {', '.join(kinds)}")
        return None
    return kinds[recipe](**shared)


def optimizer(args: Arguments) -> Settings:
    """The update rule and weight decay."""
    kinds = ("adam", "sgd", "muon", "dist_muon", "lion")
    kind = args["optimizer"]
    if kind not in kinds:
        args.refuse("optimizer", f"supported optimizers: {', '.join(kinds)}")
    shared: dict[str, Any] = {
        "weight_decay": _decay(args),
        "clip": args["clip-grad"] or None,
        **_embedding_decay(args),
        "decay_qk_norms": args["apply-wd-to-qk-layernorm"]
        if args["no-weight-decay-cond-type"] is None
        else args.one_of("no-weight-decay-cond-type", {"apply_wd_to_qk_layernorm": True, "qwen3_next": True}),
        "moments": _moments(args),
        "offload": args["optimizer-offload-fraction"] if args["optimizer-cpu-offload"] else 0.0,
    }
    config: OptimizerConfig
    if kind == "sgd":
        config = SGDConfig(momentum=args["sgd-momentum"], **shared)
    elif kind == "lion":
        config = LionConfig(beta1=args["lion-beta1"], beta2=args["lion-beta2"], **shared)
    else:
        adam = {"beta1": args["adam-beta1"], "beta2": args["adam-beta2"], "epsilon": args["adam-eps"]}
        config = _muon(args, shared | adam) if kind in ("muon", "dist_muon") else AdamWConfig(**shared, **adam)
    return {"optimizer": config}


def _embedding_decay(args: Arguments) -> dict[str, Any]:
    """Embeddings with their own initial deviation are not decayed; an untied head is."""
    if args["embedding-init-method-std"] is None:
        return {}
    args.remark("embedding-init-method-std", "turns weight decay of embeddings off, as in Megatron-LM")
    if not args["untie-embeddings-and-output-weights"]:
        return {"decay_embeddings": False}
    tables = ("tokens", "positions") if positions(args) == "learned_absolute" else ("tokens",)
    return {"groups": tuple(GroupConfig(match=name, decay=0.0) for name in tables)}


def _muon(args: Arguments, shared: dict[str, Any]) -> MuonConfig:
    if args["swiglu"] or args["quick-geglu"]:
        args.remark("optimizer", "orthogonalises gate and up separately; Megatron-LM joins them to one matrix")
    if args["muon-tp-mode"] == "blockwise":
        args.refuse("muon-tp-mode", "whole matrices are orthogonalised here, as with duplicated and distributed")
    return MuonConfig(
        momentum=args["muon-momentum"],
        nesterov=args["muon-use-nesterov"],
        iterations=args["muon-num-ns-steps"],
        coefficients=args.one_of("muon-coefficient-type", _identity("quintic", "simple", "polar_express")),
        scale=args.one_of("muon-scale-mode", _identity("spectral", "shape_scaling", "unit_rms_norm")),
        extra_scale=args["muon-extra-scale-factor"],
        **shared,
    )


def _moments(args: Arguments) -> str:
    if not args["use-precision-aware-optimizer"]:
        return "float32"
    for name in ("main-grads-dtype", "main-params-dtype"):
        if args[name] != "fp32":
            args.refuse(name, "the optimizer works on float32 weights and gradients")
    first, second = args["exp-avg-dtype"], args["exp-avg-sq-dtype"]
    for name in ("exp-avg-dtype", "exp-avg-sq-dtype"):
        if args[name] not in DTYPES:
            args.refuse(name, "moments are kept in float32, bfloat16 or float16")
    if first != second:
        args.refuse("exp-avg-sq-dtype", f"both moments have one dtype here, but --exp-avg-dtype is {first}")
    return DTYPES.get(first, "float32")


def _decay(args: Arguments) -> float:
    """Weight decay at the end of the run."""
    if args["weight-decay-incr-style"] == "constant":
        for name in ("start-weight-decay", "end-weight-decay"):
            if args.is_given(name):
                args.problem(name, "contradicts --weight-decay-incr-style constant, the default")
        return args["weight-decay"]
    for name in ("start-weight-decay", "end-weight-decay"):
        if args[name] is None:
            args.problem(name, f"must be given with --weight-decay-incr-style {args['weight-decay-incr-style']}")
    return args["end-weight-decay"] or 0.0


def global_size(args: Arguments) -> int:
    """Rows of a step, after the ramp if there is one."""
    if isinstance(steps := ramp(args), StepRampConfig):
        pairs = steps.pairs()
        return pairs[-1][1] if pairs else 1
    if args["global-batch-size"] is not None:
        return args["global-batch-size"]
    devices, model = args.devices, model_devices(args)
    if devices is None or devices % model:
        args.problem("global-batch-size", "must be given, because the number of devices is unknown")
        return 1
    size = needed(args, "micro-batch-size") * (devices // model)
    args.remark("micro-batch-size", f"without --global-batch-size a step has {size} rows: one microbatch each")
    return size


def ramp(args: Arguments) -> RampConfig | None:
    """The ramp of the batch size."""
    if args["step-batch-size-schedule"]:
        return StepRampConfig(sizes=" ".join(args["step-batch-size-schedule"]))
    if not args["rampup-batch-size"]:
        return None
    if len(numbers := args.numbers("rampup-batch-size")) != 3:
        args.problem("rampup-batch-size", "expected three numbers: start, increment, samples")
        return None
    return LinearRampConfig(start=numbers[0], increment=numbers[1], samples=numbers[2])


def batch(args: Arguments) -> Settings:
    """Rows of a step and of a microbatch, and steps of the run."""
    size, batch_ramp = global_size(args), ramp(args)
    settings: dict[str, Any] = {
        "batch.global_size": size,
        "batch.micro_size": needed(args, "micro-batch-size"),
        "steps": _steps(args, size, batch_ramp),
    }
    if batch_ramp is not None:
        settings["batch.ramp"] = batch_ramp
    if args.is_given("rampup-batch-size") and args["train-iters"] is not None:
        text = "with --train-iters is an error in Megatron-LM up to 0.18 and ignored from 0.19 on; here it takes effect"
        args.remark("rampup-batch-size", text)
    return settings


def _steps(args: Arguments, size: int, batch_ramp: RampConfig | None) -> int:
    if args["train-iters"] is not None:
        return args["train-iters"]
    if (samples := args["train-samples"]) is None:
        return needed(args, "train-iters", "train-samples")
    if batch_ramp is None or problems_of(batch_ramp) or batch_ramp.size_problems(size):
        return samples // max(size, 1)
    # Steps of the ramp, then steps of the whole batch, as Megatron-LM counts them.
    consumed = steps = 0
    if isinstance(batch_ramp, LinearRampConfig):
        while consumed <= min(batch_ramp.samples, samples):
            consumed, steps = consumed + batch_ramp.nominal(consumed, size), steps + 1
        return steps + max(0, samples - consumed) // size
    thresholds = batch_ramp.thresholds(size, args["seq-length"] or args["encoder-seq-length"] or 1)
    for (_, rows), (end, _) in pairwise(thresholds):
        more = max(0, -(-(min(end, samples) - consumed) // rows))
        consumed, steps = consumed + more * rows, steps + more
    return steps + max(0, samples - consumed) // size


def schedule(args: Arguments) -> Settings:
    """Learning rate and weight decay. With a ramp, an iteration counts as one whole batch of samples."""
    settings: dict[str, Any] = {
        "schedule.lr": args["lr"] if args["lr"] is not None else float(needed(args, "lr")),
        "schedule.on_resume": "config" if args["override-opt_param-scheduler"] else "same",
    }
    if args["use-checkpoint-opt_param-scheduler"]:
        text = (
            "resuming with a schedule that differs from the checkpoint's is refused; Megatron-LM takes the checkpoint's"
        )
        args.remark("use-checkpoint-opt_param-scheduler", text)
    if args["train-samples"] is not None:
        settings["schedule.decay_samples"] = args["lr-decay-samples"] or args["train-samples"]
    elif args.is_given("lr-decay-iters") or ramp(args) is not None:
        settings |= _step_settings(args, "decay", args["lr-decay-iters"] or args["train-iters"] or 0)
    if args["lr-warmup-fraction"] is not None:
        settings["schedule.warmup_fraction"] = args["lr-warmup-fraction"]
    elif args["lr-warmup-samples"]:
        settings["schedule.warmup_samples"] = args["lr-warmup-samples"]
    elif args["lr-warmup-iters"]:
        settings |= _step_settings(args, "warmup", args["lr-warmup-iters"])
    if args["lr-decay-style"] == "WSD":
        settings["schedule.anneal_style"] = args.one_of(
            "lr-wsd-decay-style", _identity("exponential", "linear", "cosine", "minus_sqrt")
        )
        if args["lr-wsd-decay-samples"]:
            settings["schedule.anneal_samples"] = args["lr-wsd-decay-samples"]
        else:
            settings["schedule.anneal_steps"] = needed(args, "lr-wsd-decay-iters", "lr-wsd-decay-samples")
    return settings | _decay_schedule(args)


def _step_settings(args: Arguments, prefix: str, steps: int) -> dict[str, Any]:
    """A number of steps; with a ramp, the number of samples that Megatron-LM counts for them."""
    if ramp(args) is None:
        return {f"schedule.{prefix}_steps": steps}
    return {f"schedule.{prefix}_samples": steps * global_size(args)}


def _decay_schedule(args: Arguments) -> dict[str, Any]:
    style = args["weight-decay-incr-style"]
    if style == "constant" or args["start-weight-decay"] is None:
        return {}
    settings: dict[str, Any] = {
        "schedule.weight_decay_start": args["start-weight-decay"],
        "schedule.weight_decay_style": args.one_of("weight-decay-incr-style", _identity("linear", "cosine")),
    }
    if args["train-samples"] is not None:
        settings["schedule.weight_decay_samples"] = args["train-samples"]
    elif ramp(args) is not None:
        settings |= _step_settings(args, "weight_decay", args["train-iters"] or 0)
    return settings


def evaluation(args: Arguments) -> Settings:
    """Interval and size of evaluations."""
    batches, every = args["eval-iters"], args["eval-interval"]
    if not batches:
        return {"evaluation.every": None, "evaluation.batches": 0, "evaluation.at_end": False}
    if not args.is_given("eval-interval"):
        args.remark("eval-iters", "every 1000 steps without --eval-interval, Megatron-LM's default up to 0.18")
    training_sizes = {
        "eval-micro-batch-size": args["micro-batch-size"],
        "eval-global-batch-size": args["global-batch-size"],
    }
    for name, size in training_sizes.items():
        if args[name] not in (None, size):
            args.refuse(name, f"evaluation has the batch size of training, {size} rows")
    return {"evaluation.every": every, "evaluation.batches": batches, "evaluation.full": args["full-validation"]}


def checkpoint(args: Arguments) -> Settings:
    """Saving, keeping and loading checkpoints. The run's folder is Megatron-LM's --save."""
    save, load, retain = args["save"], args["load"], args["save-retain-interval"]
    if save is None:
        args.is_given("save-interval")
        settings: dict[str, Any] = {"checkpoint.every": None, "checkpoint.at_end": False}
    else:
        settings = {"run_dir": save, "checkpoint.every": args["save-interval"]}
    newest = args["most-recent-k"] if args["most-recent-k"] > 0 else None
    settings["checkpoint.keep_last"] = newest if newest is not None or retain is None else 1
    settings["checkpoint.keep_every"] = retain
    source, only_weights = _start(args)
    if source is not None:
        settings["checkpoint.load"] = Path(source)
        settings |= {"checkpoint.parts": "weights"} if only_weights else {}
        text = "must be a MegaJAX run (megajax.convert makes one); loaded only if the run's folder has no checkpoint"
        args.remark("load" if source == load else "pretrained-checkpoint", text)
    if load is not None and load == save:
        args.remark("load", "equals --save: a run resumes from its own folder without a setting")
        if args["exit-on-missing-checkpoint"]:
            args.refuse("exit-on-missing-checkpoint", "a run whose folder is empty starts from the beginning")
    return settings


def _start(args: Arguments) -> tuple[str | None, bool]:
    """The run to start from besides the run's own folder, and whether to take its weights only."""
    save, load, pretrained = args["save"], args["load"], args["pretrained-checkpoint"]
    flags = [name for name in ("finetune", "no-load-optim") if args[name]]
    if load is not None and load != save:
        if flags:
            args.remark(flags[0], "loads the weights alone: steps and the position in the data start at 0")
        return load, bool(flags)
    for name in flags if load is not None else ():
        args.remark(name, "a run resumes from its own folder with its whole state; set checkpoint.load and "
                    "checkpoint.parts=weights to start from the weights of another run")  # fmt: skip
    return pretrained, pretrained is not None


def local_checkpoint(args: Arguments) -> Settings:
    """Local checkpoints between those in the run's folder, and their replicas."""
    every, kind, folder = (args[f"non-persistent-{name}"] for name in ("save-interval", "ckpt-type", "local-ckpt-dir"))
    replication, factor, jump = args["replication"], args["replication-factor"], args["replication-jump"]
    if every is None and kind is None:
        return {}
    if kind != "local":
        args.refuse("non-persistent-ckpt-type", "only local is supported: each process saves to a local disk")
        return {}
    if every is None or folder is None:
        missing = "--non-persistent-save-interval" if every is None else "--non-persistent-local-ckpt-dir"
        args.refuse("non-persistent-ckpt-type", f"local needs {missing}")
        return {}
    replicas = factor - 1 if replication else 0
    return {"checkpoint.local": LocalConfig(every=every, folder=Path(folder), replicas=replicas, jump=jump)}


def logging(args: Arguments) -> Settings:
    """TensorBoard and Weights & Biases."""
    settings: dict[str, Any] = {}
    if args["tensorboard-dir"] is not None:
        settings["logging.tensorboard"] = True
        args.remark("tensorboard-dir", "TensorBoard's files are written to the run's folder")
    if args["wandb-project"]:
        name = args["wandb-exp-name"] or None
        settings["logging.wandb"] = WandbConfig(project=args["wandb-project"], name=name, mode="online")
    return settings


def resilience(args: Arguments) -> Settings:
    """Early exits, skipped steps and reruns of bad steps."""
    settings: dict[str, Any] = {}
    if args.is_given("exit-interval"):
        settings["resilience.exit_after_steps"] = args["exit-interval"]
        text = "counts the steps of each attempt; Megatron-LM exits at multiples of it"
        args.remark("exit-interval", text)
    if args["iterations-to-skip"]:
        settings["resilience.skip_steps"] = args.numbers("iterations-to-skip")
        args.remark("iterations-to-skip", "steps count from 1, as in Megatron-LM from 0.18 on")
    if args["rerun-mode"] == "report_stats":
        args.refuse("rerun-mode", "only steps with bad numbers are run again")
    reruns = {"validate_results": True, "disabled": False, "report_stats": True}
    return settings | {"resilience.rerun": args.one_of("rerun-mode", reruns)}


def profile(args: Arguments) -> Settings:
    """The traced steps: from the step after --profile-step-start to --profile-step-end."""
    if not args["profile"]:
        return {}
    first, last = args["profile-step-start"] + 1, args["profile-step-end"]
    if args["train-iters"] is not None:
        last = min(last, args["train-iters"])
    if first > last:
        args.remark("profile", f"no step is after {first - 1} and up to {last}: nothing is traced")
        return {}
    settings: dict[str, Any] = {"profile.steps": f"{first}:{last}"}
    if args.is_given("profile-ranks"):
        settings["profile.processes"] = args.numbers("profile-ranks")
        args.remark("profile-ranks", "means processes here, which may have several GPUs each")
    return settings
