"""What to write instead of the names that users of other trainers type most, and instead of misspelt flags.

They are not aliases: names differ in meaning. docs/foreign_flags.md lists more of them.
"""

import shlex
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from megajax.config.config_files import Source
from megajax.config.errors import NO_SETTING, Problem
from megajax.config.hints import did_you_mean, download_folder, download_hint
from megajax.config.settings_tree import plain_name


class Key(NamedTuple):
    """Other trainers' names of one meaning, with underscores; targets: --flags of some verbs here, then a setting.

    TARGET=FORM: {} is the value, or the folder of a model that was downloaded. values: theirs=ours, in lower case.
    """

    names: str
    targets: str = ""
    values: str = ""
    note: str = ""


DTYPES = "bf16=bfloat16 fp16=float16 half=float16 fp32=float32 float=float32 no=float32 auto=bfloat16"
BATCH = "batch.global_size = batch.micro_size x microbatches x data-parallel devices"
MODEL = "a downloaded folder; python -m megajax.convert --from=hf:DIR --to=runs/NAME writes a config for it"
ROWS = (
    Key("lr learning_rate", "schedule.lr"),
    Key("lr_scheduler_type lr_decay_style", "schedule.style", "constant_with_warmup=constant"),
    Key("warmup_steps num_warmup_steps lr_warmup_iters warmup_iters", "schedule.warmup_steps"),
    Key("warmup_ratio lr_warmup_fraction", "schedule.warmup_fraction", note="a share of the decay"),
    Key("weight_decay", "optimizer.weight_decay"),
    Key("max_grad_norm clip_grad grad_clip", "optimizer.clip", "0=none 0.0=none"),
    Key("optim optimizer", "optimizer.type", "adamw_torch=AdamW adamw_torch_fused=AdamW adamw=AdamW adam=AdamW"),
    Key("max_steps train_iters max_iters", "steps"),
    Key("epochs num_epochs num_train_epochs", note="steps = epochs x training rows / batch.global_size"),
    Key("per_device_train_batch_size micro_batch_size batch_size", "--rows batch.micro_size", note=BATCH),
    Key("global_batch_size train_batch_size", "batch.global_size"),
    Key("gradient_accumulation_steps", note=BATCH),
    Key("seq_len seq_length max_seq_length block_size", "model.sequence_length"),
    Key("num_layers n_layer num_hidden_layers", "model.stack.repeats", note="layers = repeats x blocks of the pattern"),
    Key("hidden_size n_embd", "model.hidden"),
    Key("num_attention_heads n_head num_heads", "model.stack.pattern.N.mixer.heads", note="N: 0 for the first block"),
    Key("num_query_groups num_key_value_heads", "model.stack.pattern.N.mixer.kv_heads", note="N: as for heads"),
    Key("ffn_hidden_size intermediate_size", "model.stack.pattern.N.mlp.ffn", note="N: 0 for the first block"),
    Key("gradient_checkpointing recompute_granularity", "model.recompute", "true=full false=none"),
    Key("tp tp_size tensor_parallel_size tensor_model_parallel_size", "parallel.tensor"),
    Key("pp pp_size pipeline_parallel_size pipeline_model_parallel_size", "parallel.pipeline"),
    Key("dp data_parallel_size", "parallel.data", note="without it, all devices that the other axes leave"),
    Key("cp cp_size context_parallel_size", "parallel.context"),
    Key("ep ep_size expert_parallel_size expert_model_parallel_size", "parallel.expert"),
    Key("sequence_parallel", "parallel.sequence", "true=true"),
    Key("fsdp use_fsdp", "parallel.data_sharding", "true=fsdp full_shard=fsdp shard_grad_op=zero1 false=replicate"),
    Key("use_distributed_optimizer", "parallel.data_sharding", "true=zero1 false=replicate"),
    Key("bf16", "precision.compute", "true=bfloat16 false=float32"),
    Key("fp16", "precision.compute", "true=float16 false=float32"),
    Key("mixed_precision precision dtype torch_dtype", "--dtype precision.compute", DTYPES),
    Key("data_path", "data.paths", note="PREFIX of PREFIX.bin, from python -m megajax.preprocess; --data.type=Blend"),
    Key("dataset dataset_name train_file", note="text or conversations become data.paths: docs/data.md"),
    Key("tokenizer_name tokenizer_model", "--tokenizer={} tokenizer.path={}", note="of type HuggingFaceTokenizer"),
    Key("model model_name_or_path pretrained", "--hf={} --from=hf:{} checkpoint.load=hf:{}", note=MODEL),
    Key("load", "--run --from checkpoint.load", note="a run's folder, or hf:DIR"),
    Key("resume resume_from_checkpoint", note="a run continues from the newest checkpoint of its run_dir"),
    Key("save output_dir out_dir output", "--output-prefix --output --to run_dir"),
    Key("save_steps save_interval", "checkpoint.every"),
    Key("eval_steps eval_interval", "evaluation.every"),
    Key("logging_steps log_interval", "logging.every"),
    Key("report_to wandb_project", note="--logging.tensorboard, or --logging.wandb.project=NAME"),
    Key("max_model_len", "inference.length"),
    Key("gpu_memory_utilization", "inference.memory_share", note="a share of the memory that the weights leave"),
    Key("nproc_per_node num_gpus", "--processes", "gpu=none", note="a flag of python -m megajax.launch"),
)  # fmt: skip
TABLE = {name: row for row in ROWS for name in row.names.split()}
WORDS = {name: dict(pair.split("=") for pair in row.values.split()) for name, row in TABLE.items()}


def corrections(settings: Mapping[str, Any], flags: Collection[str], *, config: bool = True) -> dict[str, Problem]:
    """Name -> what to write instead, for other trainers' names. flags: of the verb; config: whether it has settings."""
    answers = {}
    for name, raw in ((name, raw) for name, raw in settings.items() if name in TABLE):
        value = str(raw) if isinstance(raw, str | int | float) else ""
        value = WORDS[name].get(value.lower() or "true", value)
        answer = Problem(f"--{name}", "is no setting here", TABLE[name].note) if config else None
        for target, _, form in reversed([target.partition("=") for target in TABLE[name].targets.split()]):
            if (config and not target.startswith("--")) or target.lstrip("-").replace("-", "_") in flags:
                text = form.format(download_folder(value) or value or "DIR") if form else value or "VALUE"
                write = f"write {shlex.quote(f'--{target.lstrip("-")}={text}')}"
                lines = [write, download_hint(value) if form else "", TABLE[name].note]
                answer = Problem(f"--{name}", f"is called {target} here", "\n".join(filter(None, lines)))
        answers |= {name: answer} if answer else {}
    return answers


def corrected(
    problems: Iterable[Problem], settings: Mapping[str, Any], flags: Collection[str], file: Source
) -> list[Problem]:
    """The problems; of unknown names, with what to write instead: our name for another trainer's, or a similar flag.

    settings: of the command line, over those of the file, which may have such names too; flags: of the verb.
    """
    lower = file.settings.items() if isinstance(file.settings, Mapping) else ()
    values, result = {**{plain_name(name): value for name, value in lower}, **settings}, []
    answers = corrections(values, flags)
    for problem in problems:
        unknown = problem.message == NO_SETTING
        name = problem.setting if unknown else problem.setting.removesuffix(".type")  # optimizer=adam: optimizer.type
        value = raw if isinstance(raw := values.get(name), str) else ""
        if name in answers and (unknown or value.lower() in WORDS[name] or "/" in value):
            problem = answers[name] if name in settings else replace(answers[name], setting=name)
        elif unknown and name in settings and "." not in name and (hint := did_you_mean(name, flags)):
            problem = Problem(f"--{name.replace('_', '-')}", "no such flag or setting", hint.replace("_", "-"))
        result.append(problem)
    return result
