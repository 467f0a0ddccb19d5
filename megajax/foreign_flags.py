"""Settings under the names of other trainers, and what to write instead. They are not aliases: names differ in meaning.

Of Hugging Face (Trainer, TRL, Accelerate), Megatron-LM, torchtitan, MaxText, nanoGPT, DeepSpeed, vLLM and lm-eval.
"""

import re
import shlex
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megajax.config.dump import flatten
from megajax.config.errors import NO_SETTING, Problem
from megajax.config.nearest import did_you_mean, download_folder, download_hint
from megajax.config.patch import Mark, patch_of
from megajax.config.tree import assemble

type Answer = tuple[Mapping[str, str], str]
"""Our settings with values, and a note."""


@dataclass(frozen=True, slots=True)
class Row:
    """Names of one meaning, with underscores, and our setting. N in a setting stands for every entry of a list."""

    names: str
    settings: str = ""
    """Dotted names; more than one if all of them are meant."""
    values: str = ""
    """theirs=ours, in lower case; *=ours for any other value. Values that are not listed stay as they are."""
    note: str = ""
    flags: str = ""
    """Our flags, for verbs that have one of them; or settings of verbs that are not training."""
    by: Callable[[str, Mapping[str, Any]], Answer] | None = None
    """Computes the answer from the value and the settings of the config."""

    @property
    def words(self) -> Mapping[str, str]:
        """Their value -> ours."""
        return dict(pair.split("=") for pair in self.values.split())


def layers(value: str, settings: Mapping[str, Any]) -> Answer:
    """layers = repeats x blocks of the pattern, summed over segments."""
    repeats = {name: number for name, number in settings.items() if _matches("model.stack.repeats", name)}
    lengths = {name: _length(name.removesuffix(".repeats"), settings) for name in repeats}
    if any(".segments." in name for name in repeats):
        parts = ", ".join(f"{name} = {number} x {lengths[name]}" for name, number in repeats.items())
        return {}, f"layers are the sum of the segments' repeats x blocks of a pattern: {parts}"
    if not value.isdigit() or any(int(value) % length for length in lengths.values()):
        return {}, f"layers are repeats x blocks of a pattern, here {max(lengths.values(), default=1)}"
    return {name: str(int(value) // length) for name, length in lengths.items()}, ""


def accumulation(value: str, settings: Mapping[str, Any]) -> Answer:
    """global_size = micro_size x microbatches x data-parallel devices."""
    micro = str(settings.get("batch.micro_size", 1))
    formula = "global_size = micro_size x microbatches x data-parallel devices"
    if not (value.isdigit() and micro.isdigit()):
        return {}, formula
    rows = int(micro) * int(value)
    return {"batch.global_size": str(rows)}, f"{formula}: {micro} x {value} x 1; with N of them, {rows} x N"


def epochs(value: str, settings: Mapping[str, Any]) -> Answer:
    """steps = epochs x training rows / batch.global_size."""
    rows = settings.get("batch.global_size", "batch.global_size")
    text = f"steps = {value or 'epochs'} x training rows / {rows} rows a step"
    return {}, f"{text}; a run prints its training rows at the start, e.g. with --steps=1"


def samples(value: str, settings: Mapping[str, Any]) -> Answer:
    """steps = samples / batch.global_size."""
    rows = settings.get("batch.global_size", "batch.global_size")
    return {}, f"steps = {value or 'samples'} / {rows} rows a step (batch.global_size)"


def token_files(value: str, settings: Mapping[str, Any]) -> Answer:
    """Prefixes of token files; with --data.type=Blend if the config has other data."""
    data_type = {} if "data.paths" in settings else {"data.type": "Blend"}
    note = "token files, PREFIX of PREFIX.bin, from python -m megajax.preprocess; blends: WEIGHT,PREFIX,WEIGHT,PREFIX"
    return data_type | {"data.paths": ",".join(value.split())}, note


def tokenizer(value: str, settings: Mapping[str, Any]) -> Answer:
    """A local folder or file; with --tokenizer.type=HuggingFaceTokenizer if the config has another tokenizer."""
    tokenizer_type = {} if "tokenizer.path" in settings else {"tokenizer.type": "HuggingFaceTokenizer"}
    hint = download_hint(value) or "a local folder with a tokenizer.json, or that file"
    return tokenizer_type | {"tokenizer.path": download_folder(value) or value}, hint


def pretrained(value: str, settings: Mapping[str, Any]) -> Answer:
    """hf:DIR, a downloaded folder; the config has the sizes of its model."""
    folder = download_folder(value) or value or "DIR"
    convert = f"python -m megajax.convert --from=hf:{folder} --to=runs/NAME writes runs/NAME/config.yaml"
    notes = (download_hint(value), f"--config must have the sizes of its model: {convert}")
    return {"checkpoint.load": f"hf:{folder}"}, "\n".join(filter(None, notes))


STYLES = (
    "constant_with_warmup=constant inverse_sqrt=inverse_square_root inverse-square-root=inverse_square_root "
    "warmup_stable_decay=wsd"
)
DTYPES = (
    "bf16=bfloat16 fp16=float16 half=float16 fp32=float32 float=float32 no=float32 32=float32 bf16-mixed=bfloat16 "
    "16-mixed=float16 bf16-true=bfloat16 16-true=float16 32-true=float32 torch.bfloat16=bfloat16 torch.float16=float16 "
    "torch.float32=float32"
)
SWITCH = "true=true false=false"
COMMAND = (
    "start it with python -m megajax.launch --processes=N -- python -m megajax.train ..., one process for each GPU"
)

ROWS = (
    # Optimizer and learning rate
    Row("lr learning_rate optimizer.lr", "schedule.lr"),
    Row("min_lr lr_end", "schedule.min_lr"),
    Row("lr_scheduler_type lr_decay_style lr_scheduler", "schedule.style", STYLES),
    Row("num_warmup_steps warmup_steps warmup_iters lr_warmup_iters lr_warmup_steps lr_scheduler.warmup_steps",
        "schedule.warmup_steps"),
    Row("warmup_ratio lr_warmup_fraction warmup_steps_fraction", "schedule.warmup_fraction",
        note="a share of the decay"),
    Row("lr_decay_iters lr_decay_steps learning_rate_schedule_steps", "schedule.decay_steps"),
    Row("weight_decay wd adam_weight_decay", "optimizer.weight_decay"),
    Row("adam_beta1 beta1 adam_b1", "optimizer.beta1"),
    Row("adam_beta2 beta2 adam_b2", "optimizer.beta2"),
    Row("adam_epsilon adam_eps optimizer.eps", "optimizer.epsilon"),
    Row("max_grad_norm clip_grad grad_clip gradient_clipping gradient_clipping_threshold training.max_norm",
        "optimizer.clip", "0=none 0.0=none"),
    Row("optim optimizer optimizer.name opt_type", "optimizer.type",
        "adamw_torch=AdamW adamw_torch_fused=AdamW adamw_hf=AdamW adamw=AdamW adam=AdamW adam_pax=AdamW "
        "dist_muon=Muon"),
    # Length of the run and batch sizes
    Row("max_steps max_iters train_iters train_steps num_train_steps max_train_steps training.steps", "steps"),
    Row("per_device_train_batch_size per_device_batch_size micro_batch_size train_micro_batch_size_per_gpu "
        "training.local_batch_size batch_size mbs", "batch.micro_size",
        note="rows of a microbatch on each data-parallel device; batch.global_size: rows of a step on all devices",
        flags="rows"),
    Row("global_batch_size train_batch_size training.global_batch_size gbs", "batch.global_size"),
    Row("gradient_accumulation_steps grad_accum_steps accumulate_grad_batches", "batch.global_size", by=accumulation),
    Row("epochs num_epochs num_train_epochs max_epochs", "steps", by=epochs),
    Row("train_samples", "steps", by=samples),
    Row("per_device_eval_batch_size eval_batch_size", note="evaluation uses batch.global_size and batch.micro_size"),
    # Model
    Row("seq_len seq_length sequence_length max_seq_length max_seq_len block_size context_length "
        "max_target_length training.seq_len", "model.sequence_length"),
    Row("max_length", "model.sequence_length", flags="max_tokens"),
    Row("num_layers n_layer n_layers num_hidden_layers base_num_decoder_layers", "model.stack.repeats", by=layers),
    Row("hidden_size n_embd d_model base_emb_dim emb_dim", "model.hidden"),
    Row("num_attention_heads n_head n_heads num_heads base_num_query_heads", "model.stack.pattern.N.mixer.heads"),
    Row("num_key_value_heads num_query_groups num_kv_heads n_kv_heads base_num_kv_heads",
        "model.stack.pattern.N.mixer.kv_heads"),
    Row("head_dim kv_channels", "model.stack.pattern.N.mixer.head_dim"),
    Row("ffn_hidden_size intermediate_size base_mlp_dim mlp_dim d_ff", "model.stack.pattern.N.mlp.ffn"),
    Row("num_experts num_local_experts n_routed_experts", "model.stack.pattern.N.mlp.experts"),
    Row("moe_router_topk num_experts_per_tok", "model.stack.pattern.N.mlp.top_k"),
    Row("moe_ffn_hidden_size moe_intermediate_size base_moe_mlp_dim", "model.stack.pattern.N.mlp.expert.ffn"),
    Row("vocab_size padded_vocab_size", "model.vocabulary_size"),
    Row("rope_theta rotary_base rope_max_timescale", "model.stack.pattern.N.mixer.rope.base"),
    Row("dropout hidden_dropout", "model.dropout model.stack.pattern.N.dropout"),
    Row("attention_dropout", "model.stack.pattern.N.mixer.dropout"),
    Row("init_method_std initializer_range", "model.init_std"),
    Row("tie_word_embeddings weight_tying", "model.tied", SWITCH),
    Row("untie_embeddings_and_output_weights", "model.tied", "true=false false=true"),
    Row("gradient_checkpointing activation_checkpoint.mode recompute_granularity remat_policy", "model.recompute",
        "true=full false=none minimal=selective"),
    Row("recompute_activations", "model.recompute", "true=selective false=none"),
    Row("attn_implementation use_flash_attn flash_attn attention_backend",
        note="the fastest kernel of the device is used; a run prints it; docs/attention.md"),
    Row("lora_r lora_rank use_peft use_lora", "model.lora.rank", "true=8"),
    Row("lora_alpha", "model.lora.alpha"),
    Row("lora_dropout", "model.lora.dropout"),
    Row("lora_target_modules", note="--model.lora.targets=*.mixer.query: patterns of paths; docs/lora.md"),
    Row("load_in_4bit load_in_8bit quantization",
        note="see python -m megajax.convert --quantize; docs/quantization.md"),
    # Layout
    Row("tp tp_size tensor_parallel tensor_parallel_size tensor_model_parallel_size ici_tensor_parallelism "
        "parallelism.tensor_parallel_degree", "parallel.tensor"),
    Row("pp pp_size pipeline_parallel_size pipeline_model_parallel_size ici_pipeline_parallelism "
        "parallelism.pipeline_parallel_degree", "parallel.pipeline"),
    Row("dp dp_size data_parallel_size ici_data_parallelism "
        "parallelism.data_parallel_replicate_degree", "parallel.data",
        note="without it, all devices that the other axes leave"),
    Row("cp cp_size context_parallel_size ici_context_parallelism parallelism.context_parallel_degree",
        "parallel.context"),
    Row("ep ep_size expert_parallel_size expert_model_parallel_size ici_expert_parallelism "
        "parallelism.expert_parallel_degree", "parallel.expert"),
    Row("sequence_parallel", "parallel.sequence", SWITCH),
    Row("fsdp use_fsdp use_torch_fsdp2 ici_fsdp_parallelism dp_shard parallelism.data_parallel_shard_degree",
        "parallel.data_sharding",
        "false=replicate no_shard=replicate shard_grad_op=zero1 1=replicate *=fsdp",
        note="over parallel.data devices, which are all that the other axes leave"),
    Row("zero_stage zero_optimization zero_optimization.stage use_distributed_optimizer", "parallel.data_sharding",
        "0=replicate 1=zero1 2=zero1 3=fsdp false=replicate true=zero1"),
    Row("pipeline_schedule parallelism.pipeline_parallel_schedule", "parallel.schedule",
        "1f1b=1f1b interleaved1f1b=interleaved gpipe=gpipe"),
    Row("deepspeed deepspeed_config config_file accelerate_config job.config_file",
        note="one --config=FILE has all settings: parallel.data_sharding=zero1 is ZeRO-1, fsdp is ZeRO-3 or FSDP"),
    # Precision
    Row("bf16", "precision.compute", "true=bfloat16 false=float32"),
    Row("fp16", "precision.compute", "true=float16 false=float32"),
    Row("mixed_precision precision training.mixed_precision_param", "precision.compute", DTYPES),
    Row("dtype torch_dtype", "precision.compute", f"{DTYPES} auto=bfloat16", flags="dtype inference.compute"),
    Row("fp8 fp8_format", "precision.fp8.format", "true=hybrid", note="docs/fp8.md"),
    Row("compile torch_compile compile.enable training.compile", note="every step is compiled"),
    # Data
    Row("data_path train_data_path", "data.paths", by=token_files),
    Row("split", "data.split"),
    Row("dataset dataset_name dataset_path train_file training.dataset dataset_type",
        note="text: python -m megajax.preprocess --input=FILE --output-prefix=PREFIX, then --data.type=Blend "
             "--data.paths=PREFIX; conversations: --data.type=Chat --data.paths=FILE.jsonl; docs/data.md"),
    Row("tokenizer_name tokenizer_name_or_path tokenizer_path tokenizer_model", "tokenizer.path", by=tokenizer,
        flags="tokenizer"),
    Row("tokenizer_type", "tokenizer.type", "gpt2bpetokenizer=GPT2Tokenizer llama2tokenizer=SentencePieceTokenizer "
        "tiktokenizer=TiktokenTokenizer bertwordpiecelowercase=WordPieceTokenizer"),
    Row("num_workers dataloader_num_workers", "data.loader.threads"),
    Row("data_seed data_shuffle_seed", "data.seed"),
    Row("training.seed debug.seed set_seed init_weights_seed", "seed"),
    Row("packing", note="rows of token files are always full; of conversations, --data.packing; docs/data.md"),
    # Checkpoints and logs
    Row("output_dir out_dir save save_dir ckpt_dir checkpoint_dir dump_folder job.dump_folder base_output_directory",
        "run_dir", flags="run_dir output to"),
    Row("run logdir", "run_dir", flags="run_dir from"),
    Row("output", "run_dir", flags="output_prefix to run_dir"),
    Row("input input_file", flags="input from", note="text for python -m megajax.preprocess --input=FILE"),
    Row("output_path output_file", "run_dir", flags="output to"),
    Row("run_name experiment_name", "run_dir", note="e.g. --run_dir=runs/NAME; of wandb: logging.wandb.name"),
    Row("save_steps save_interval checkpoint_period checkpoint.interval", "checkpoint.every"),
    Row("save_total_limit checkpoint.keep_latest_k", "checkpoint.keep_last"),
    Row("load load_dir load_checkpoint load_parameters_path ckpt_path checkpoint_path checkpoint.initial_load_path "
        "run_dir", "checkpoint.load", flags="run from",
        note="a run's folder, or hf:DIR; without it, a run continues from its own run_dir"),
    Row("resume resume_from_checkpoint auto_resume init_from",
        note="a run continues from the newest checkpoint of its run_dir; from another run: --checkpoint.load=RUN"),
    Row("overwrite_output_dir", note="a run_dir with checkpoints is continued: give another run_dir, or delete it"),
    Row("eval_steps eval_interval eval_freq validation.freq", "evaluation.every",
        note="steps between evaluations; batches of each: evaluation.batches"),
    Row("eval_iters max_eval_batches validation.steps", "evaluation.batches"),
    Row("logging_steps log_interval log_freq log_period metrics.log_freq", "logging.every"),
    Row("report_to", note="--logging.tensorboard, or --logging.wandb.project=NAME"),
    Row("tensorboard tensorboard_dir logging_dir metrics.enable_tensorboard", "logging.tensorboard",
        "false=false *=true", note="in RUN_DIR/tensorboard"),
    Row("wandb_project", "logging.wandb.project"),
    Row("wandb_run_name wandb_exp_name", "logging.wandb.name"),
    Row("wandb_log use_wandb enable_wandb metrics.enable_wandb", "logging.wandb.mode", "true=online false=disabled"),
    Row("push_to_hub hub_model_id", note="python -m megajax.convert --from=RUN --to=hf:DIR writes a folder to upload"),
    # Models of generate, serve, evaluate and convert
    Row("model_name_or_path pretrained_model_name_or_path model_name model_path model pretrained model_args base_model "
        "hf_model", "checkpoint.load", "hf=DIR", by=pretrained, flags="hf from"),
    Row("model.name model.flavor", note="a size is a function of a config file: --config=llama3.py:llama3_8b"),
    Row("peft peft_model lora_path lora_modules enable_lora", flags="adapter", note="a PEFT folder"),
    Row("trust_remote_code", note="code of a model folder is never run"),
    Row("max_new_tokens max_gen_toks n_predict max_output_tokens", flags="max_tokens"),
    Row("num_beams", flags="beams"),
    Row("num_return_sequences", flags="n"),
    Row("do_sample", flags="temperature", values="false=0 true=1"),
    Row("max_model_len ctx_size", "inference.length"),
    Row("max_num_seqs max_batch_size", "inference.rows"),
    Row("gpu_memory_utilization mem_fraction_static", "inference.memory_share"),
    Row("kv_cache_dtype", "inference.cache_dtype", "fp8_e4m3=fp8 auto=none"),
    Row("served_model_name", "server.name"),
    Row("api_key", flags="api_key_file", values="*=FILE"),
    Row("num_fewshot", note="--tasks=lm-eval:NAME:fewshot=N"),
    Row("limit", note="--tasks=lm-eval:NAME:limit=N"),
    Row("do_train do_eval do_predict", note="verbs: python -m megajax.train, evaluate, generate"),
    # Devices and processes
    Row("device", flags="devices", values="cuda=gpu cuda:0=gpu cpu=cpu"),
    Row("use_cpu no_cuda", flags="devices", values="true=cpu"),
    Row("nproc_per_node num_gpus gpus n_gpu ngpus gpus_per_node nprocs",
        flags="processes", values="gpu=none auto=none", note=COMMAND),
    Row("nnodes num_nodes num_machines", flags="machines", note=COMMAND),
    Row("node_rank machine_rank", flags="machine", note=COMMAND),
    Row("master_addr rdzv_endpoint main_process_ip", flags="coordinator", note="HOST:PORT of the first machine"),
    Row("master_port main_process_port", flags="coordinator_port", note="the PORT in --coordinator=HOST:PORT"),
    Row("local_rank rank world_size", note=COMMAND),
)  # fmt: skip
"""One row a meaning."""
TABLE: Mapping[str, Row] = {name: row for row in ROWS for name in row.names.split()}


def corrections(
    arguments: Mapping[str, Any], config: Any = None, flags: Collection[str] = (), *, takes_settings: bool = True
) -> dict[str, Problem]:
    """Name -> what to write instead, for those of the names that are other trainers'.

    arguments: name with underscores -> value; config: of the others, None if there is none; flags: of the verb;
    takes_settings: whether it has a config.
    """
    settings = {} if config is None else flatten(config)
    answered: dict[str, Problem] = {}
    answers: dict[str, Answer] = {}
    written: dict[str, str] = {}
    direct: set[str] = set()
    # Computed answers come last, in the order of the table: they depend on the values of the others.
    for name in sorted((name for name in TABLE if name in arguments), key=lambda name: TABLE[name].by is not None):
        row, value = TABLE[name], "" if arguments[name] is Mark.BARE else str(arguments[name])
        flag = next((flag for flag in row.flags.split() if flag in flags or ("." in flag and flag in settings)), "")
        if flag:
            answered[name] = _flag(name, flag, row, value)
        elif not takes_settings and row.settings:
            answered[name] = Problem(f"--{name}", f"no such flag; a setting of training is {row.settings}")
        else:
            values, note = row.by(value, settings) if row.by else (_values(row, value, settings), row.note)
            if row.by is None:
                direct |= values.keys()
            else:  # a name for the setting itself counts
                values = {setting: text for setting, text in values.items() if setting not in direct}
            answers[name] = values, note
            settings |= values
            written |= values
    problems = [] if config is None else assemble(type(config), config, patch_of(written.items()))[1]
    answered |= {name: _setting(name, *answer, problems, config) for name, answer in answers.items()}
    return {name: answered[name] for name in arguments if name in answered}


def with_corrections(
    problems: Iterable[Problem],
    arguments: Mapping[str, Any],
    flags: Collection[str],
    configure: Callable[[Mapping[str, Any]], Any] = lambda settings: None,
) -> list[Problem]:
    """The problems; of unknown names, with what to write instead: our name for another trainer's, or a similar flag.

    arguments: all settings of the command line; flags: of the verb; configure: the config with some of the settings,
    None if it can't be built.
    """
    problems = list(problems)
    names = [_unknown(problem, arguments) for problem in problems]
    others = {name: value for name, value in arguments.items() if name not in names}
    config = configure(others) if any(names) else None
    answered = corrections({name: value for name, value in arguments.items() if name in names}, config, flags)
    pairs = zip(problems, names, strict=True)
    return [answered[name] if name else _with_flag(problem, arguments, flags) for problem, name in pairs]


def _unknown(problem: Problem, arguments: Mapping[str, Any]) -> str:
    """The name in TABLE that causes a problem: an unknown one, or one of ours with another trainer's value; or ""."""
    name = problem.setting
    if problem.message == NO_SETTING and name in arguments and name in TABLE:
        return name
    part = name.removesuffix(".type")
    value = str(arguments[part]).lower() if part != name and part in arguments and part in TABLE else ""
    is_theirs = value and (value in TABLE[part].words or (TABLE[part].by is pretrained and "/" in value))
    return part if is_theirs else ""


def _with_flag(problem: Problem, arguments: Mapping[str, Any], flags: Collection[str]) -> Problem:
    """The problem; of an unknown name that is similar to a flag, such as --skip-trian, with that flag."""
    is_name = problem.message == NO_SETTING and problem.setting in arguments and "." not in problem.setting
    hint = did_you_mean(problem.setting, flags).replace("_", "-") if is_name else ""
    return Problem(f"--{problem.setting.replace('_', '-')}", "no such flag or setting", hint) if hint else problem


def _flag(name: str, flag: str, row: Row, value: str) -> Problem:
    """What to write instead of `name` if the verb has a flag for it."""
    target, hint = f"--{flag.replace('_', '-')}", ""
    if row.by is pretrained:
        value = value.removeprefix("pretrained=").partition(",")[0]
        hint, value = download_hint(value), download_folder(value) or value
    text = ("hf:" if flag == "from" and row.by is pretrained else "") + (_value(row, value) or "VALUE")
    hint = f"write {shlex.quote(f'{target}={text}')}" + f"\n{hint}" * bool(hint)
    return Problem(f"--{name}", f"is called {target} here", hint)


def _setting(name: str, values: Mapping[str, str], note: str, problems: Sequence[Problem], config: Any) -> Problem:
    """What to write instead of `name`. problems: of the config with the values of all names."""
    row = TABLE[name]
    problems = [p for p in problems if {p.setting, p.setting.removesuffix(".type")} & values.keys()]
    has_none = any(problem.message == NO_SETTING for problem in problems) or (row.settings and not (values or note))
    if has_none and config is not None:
        return Problem(f"--{name}", f"is called {row.settings}, and this config has no such setting")
    target = " and ".join(values or row.settings.split())
    others = " or ".join(f"--{flag.replace('_', '-')}" for flag in row.flags.split())
    message = f"is no setting here{f'; other verbs have {others}' if others else ''}"
    message = f"is {'set by' if row.by else 'called'} {target} here" if target else message
    words = [shlex.quote(f"--{target}={text or 'VALUE'}") for target, text in values.items() if ".N." not in target]
    mismatches = [problem for problem in problems if problem.message.startswith("expected ")]
    texts = [f"{problem.setting}: {problem.message}" for problem in mismatches]
    lines = [f"write {' '.join(words)}" if words else "", *texts, note]
    return Problem(f"--{name}", message, "\n".join(filter(None, lines)))


def _value(row: Row, value: str) -> str:
    """Our value for theirs. A switch without a value is true."""
    values = row.words
    known = value.lower() or ("true" if "true" in values or "*" in values else "")
    return values.get(known, values.get("*", value))


def _values(row: Row, value: str, settings: Mapping[str, Any]) -> dict[str, str]:
    """Our settings of a row in this config, with the value."""
    names = row.settings.split()
    places = [place for name in names for place in _places(name, settings)] if settings else names
    return dict.fromkeys(places, _value(row, value))


def _places(setting: str, settings: Mapping[str, Any]) -> list[str]:
    """The settings in the blocks of the model, or the setting itself. A Mamba layer's heads are not attention's."""
    if not setting.startswith("model.stack."):
        return [setting]
    mixers = {name.removesuffix(".type"): str(kind) for name, kind in settings.items() if name.endswith(".mixer.type")}
    return [
        name
        for name in settings
        if _matches(setting, name) and not mixers.get(name.rpartition(".")[0], "").startswith("Mamba")
    ]


def _matches(setting: str, name: str) -> bool:
    """Whether a setting of a config is this one: of any block, segment, encoder, and cross-attention."""
    pattern = re.escape(setting).replace(r"\.N\.", r"\.\d+\.").replace(r"\.mixer\.", r"\.(mixer|cross)\.")
    return re.fullmatch(pattern.replace(r"model\.stack", r"model\.(stack|encoder)(\.segments\.\d+)?"), name) is not None


def _length(stack: str, settings: Mapping[str, Any]) -> int:
    """Number of blocks in the pattern of a stack."""
    start = f"{stack}.pattern."
    return len({name.removeprefix(start).partition(".")[0] for name in settings if name.startswith(start)})
