"""Names of other trainers' settings, and ours. They are not aliases: names differ in meaning.

Of Hugging Face (Trainer, TRL, Accelerate), Megatron-LM, torchtitan, MaxText, nanoGPT, DeepSpeed, vLLM and lm-eval.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megajax.config.hints import download_folder, download_hint

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
    repeats = {name: number for name, number in settings.items() if matches("model.stack.repeats", name)}
    lengths = {name: _length(name.removesuffix(".repeats"), settings) for name in repeats}
    if any(".segments." in name for name in repeats):
        parts = ", ".join(f"{name} = {number} x {lengths[name]}" for name, number in repeats.items())
        return {}, f"layers are the sum of the segments' repeats x blocks of a pattern: {parts}"
    if not value.isdigit() or any(int(value) % length for length in lengths.values()):
        return {}, f"layers are repeats x blocks of a pattern, here {max(lengths.values(), default=1)}"
    return {name: str(int(value) // length) for name, length in lengths.items()}, ""


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
    notes = (
        download_hint(value),
        f"--config must have the sizes of its model: {convert}",
        "a size without weights is a function of a config file: --config=llama3.py:llama3_8b",
    )
    return {"checkpoint.load": f"hf:{folder}"}, "\n".join(filter(None, notes))


STYLES = (
    "constant_with_warmup=constant inverse_sqrt=inverse_square_root inverse-square-root=inverse_square_root "
    "warmup_stable_decay=wsd cosine_with_min_lr=cosine cosine_warmup_with_min_lr=cosine"
)
DTYPES = (
    "bf16=bfloat16 fp16=float16 half=float16 fp32=float32 float=float32 no=float32 32=float32 bf16-mixed=bfloat16 "
    "16-mixed=float16 bf16-true=bfloat16 16-true=float16 32-true=float32 16=float16 torch.bfloat16=bfloat16 "
    "torch.float16=float16 torch.float32=float32"
)
SWITCH = "true=true false=false"
COMMAND = (
    "start it with python -m megajax.launch --processes=N -- python -m megajax.train ..., one process for each GPU"
)

ROWS = (
    # Optimizer and learning rate
    Row("lr learning_rate optimizer.lr", "schedule.lr"),
    Row("min_lr lr_end", "schedule.min_lr"),
    Row("lr_scheduler_type lr_decay_style lr_scheduler lr_schedule_type", "schedule.style", STYLES),
    Row("lr_scheduler.min_lr_factor lr_scheduler.lr_min learning_rate_final_fraction",
        note="schedule.min_lr = share x schedule.lr"),
    Row("lr_scheduler.decay_ratio wsd_decay_steps_fraction",
        note="--schedule.style=wsd, with schedule.anneal_steps = share x steps; the shape there is linear by default: "
             "--schedule.anneal_style=linear"),
    Row("lr_scheduler.decay_type", "schedule.style", "sqrt=wsd",
        note="with lr_scheduler.decay_ratio, schedule.style=wsd and the shape in schedule.anneal_style; of sqrt, "
             "minus_sqrt"),
    Row("lr_wsd_decay_style wsd_decay_style", "schedule.anneal_style"),
    Row("lr_wsd_decay_iters", "schedule.anneal_steps"),
    Row("num_warmup_steps warmup_steps warmup_iters lr_warmup_iters lr_scheduler.warmup_steps",
        "schedule.warmup_steps", note="of Trainer, a value below 1 is schedule.warmup_fraction"),
    Row("warmup_ratio lr_warmup_fraction warmup_steps_fraction", "schedule.warmup_fraction",
        note="a share of the decay, which is the whole run without schedule.decay_steps"),
    Row("lr_decay_iters learning_rate_schedule_steps", "schedule.decay_steps", "-1=none",
        note="with the warm-up"),
    Row("weight_decay wd adam_weight_decay", "optimizer.weight_decay"),
    Row("adam_beta1 beta1 adam_b1", "optimizer.beta1"),
    Row("adam_beta2 beta2 adam_b2", "optimizer.beta2"),
    Row("adam_epsilon adam_eps optimizer.eps", "optimizer.epsilon"),
    Row("max_grad_norm clip_grad grad_clip gradient_clipping gradient_clipping_threshold training.max_norm",
        "optimizer.clip", "0=none 0.0=none"),
    Row("optim optimizer opt_type", "optimizer.type",
        "adamw_torch=AdamW adamw_torch_fused=AdamW adamw_hf=AdamW adamw=AdamW adam=AdamW adam_pax=AdamW "
        "lion_32bit=Lion dist_muon=Muon"),
    Row("optimizer.name", "optimizer.type", "adam=AdamW", note="for Adam, also --optimizer.decoupled=false"),
    # Length of the run and batch sizes
    Row("max_steps max_iters train_iters train_steps num_train_steps max_train_steps training.steps", "steps"),
    Row("per_device_train_batch_size micro_batch_size train_micro_batch_size_per_gpu training.local_batch_size "
        "batch_size mbs", "batch.micro_size",
        note="rows of a microbatch on each data-parallel device; batch.global_size: rows of a step on all devices",
        flags="rows"),
    Row("parallelism.pipeline_parallel_microbatch_size", "batch.micro_size",
        note="with a pipeline; training.local_batch_size is then rows of a step on each data-parallel device"),
    Row("per_device_batch_size", flags="rows",
        note="batch.micro_size = rows of a device x tensor x context x pipeline; batch.global_size = rows of a device "
             "x all devices x accumulation"),
    Row("global_batch_size train_batch_size training.global_batch_size gbs", "batch.global_size"),
    Row("gradient_accumulation_steps grad_accum_steps accumulate_grad_batches",
        note="batch.global_size = batch.micro_size x microbatches x data-parallel devices (of nanoGPT: the devices "
             "count already)"),
    Row("epochs num_epochs num_epoch num_train_epochs max_epochs",
        note="steps = epochs x training rows / batch.global_size; a run prints its training rows at the start, e.g. "
             "with --steps=1"),
    Row("train_samples", note="steps = samples / batch.global_size"),
    Row("per_device_eval_batch_size eval_batch_size eval_per_device_batch_size validation.local_batch_size",
        note="evaluation uses batch.global_size and batch.micro_size"),
    # Model
    Row("seq_len seq_length sequence_length max_seq_length max_seq_len context_length max_target_length "
        "training.seq_len", "model.sequence_length"),
    Row("block_size", "model.sequence_length", flags="inference.block", note="of vLLM, tokens of a block of the cache"),
    Row("max_position_embeddings n_positions", note="there are as many positions as model.sequence_length"),
    Row("max_length", "model.sequence_length", flags="inference.length",
        note="of prompt and answer in generate: inference.length"),
    Row("num_layers n_layer n_layers num_hidden_layers base_num_decoder_layers", "model.stack.repeats", by=layers),
    Row("hidden_size n_embd d_model base_emb_dim emb_dim", "model.hidden"),
    Row("num_attention_heads n_head n_heads num_heads base_num_query_heads", "model.stack.pattern.N.mixer.heads"),
    Row("num_key_value_heads num_query_groups num_kv_heads n_kv_heads base_num_kv_heads",
        "model.stack.pattern.N.mixer.kv_heads"),
    Row("head_dim kv_channels", "model.stack.pattern.N.mixer.head_dim"),
    Row("ffn_hidden_size intermediate_size n_inner base_mlp_dim mlp_dim d_ff", "model.stack.pattern.N.mlp.ffn"),
    Row("num_experts num_local_experts n_routed_experts", "model.stack.pattern.N.mlp.experts"),
    Row("moe_router_topk num_experts_per_tok", "model.stack.pattern.N.mlp.top_k"),
    Row("moe_ffn_hidden_size moe_intermediate_size base_moe_mlp_dim", "model.stack.pattern.N.mlp.expert.ffn"),
    Row("vocab_size", "model.vocabulary_size"),
    Row("padded_vocab_size",
        note="model.vocabulary_size counts ids without padding; the table has a multiple of model.vocabulary_multiple"),
    Row("rope_theta rotary_base rope_max_timescale", "model.stack.pattern.N.mixer.rope.base"),
    Row("dropout dropout_rate", "model.dropout model.stack.pattern.N.dropout model.stack.pattern.N.mixer.dropout"),
    Row("hidden_dropout", "model.dropout model.stack.pattern.N.dropout"),
    Row("attention_dropout", "model.stack.pattern.N.mixer.dropout"),
    Row("init_method_std initializer_range", "model.init_std"),
    Row("tie_word_embeddings weight_tying logits_via_embedding", "model.tied", SWITCH),
    Row("untie_embeddings_and_output_weights", "model.tied", "true=false false=true"),
    Row("gradient_checkpointing activation_checkpointing activation_checkpoint.mode recompute_granularity "
        "remat_policy fsdp_activation_checkpointing", "model.recompute",
        "true=full false=none minimal=selective minimal_with_context=selective"),
    Row("recompute_activations", "model.recompute", "true=selective false=none"),
    Row("attn_implementation use_flash_attn flash_attn attention_backend",
        note="the fastest kernel of the device is used; a run prints it; docs/attention.md"),
    Row("lora_r lora_rank", "model.lora.rank"),
    Row("lora_alpha", "model.lora.alpha"),
    Row("use_peft use_lora", note="--model.lora.rank=16 --model.lora.alpha=32, as in TRL; docs/tuning.md"),
    Row("lora_dropout", "model.lora.dropout"),
    Row("use_rslora", "model.lora.rank_stabilized"),
    Row("use_dora", "model.lora.decomposed"),
    Row("lora_target_modules", note="--model.lora.targets=*.mixer.query: patterns of paths; docs/tuning.md"),
    Row("load_in_4bit load_in_8bit quantization", note="see python -m megajax.convert --quantize; "
        "docs/inference.md; training in 8 bits: --precision.matmul=Fp8Current"),
    Row("label_smoothing_factor", "model.label_smoothing"),
    Row("z_loss_multiplier", "model.z_loss"),
    # Layout
    Row("tp tp_size tensor_parallel tensor_parallel_size tensor_model_parallel_size ici_tensor_parallelism "
        "parallelism.tensor_parallel_degree parallelism_config_tp_size", "parallel.tensor"),
    Row("pp pp_size pipeline_parallel_size pipeline_model_parallel_size ici_pipeline_parallelism "
        "parallelism.pipeline_parallel_degree", "parallel.pipeline"),
    Row("dp dp_size data_parallel_size", "parallel.data", note="without it, all devices that the other axes leave"),
    Row("parallelism.data_parallel_replicate_degree parallelism_config_dp_replicate_size dp_replicate "
        "ici_data_parallelism", note="parallel.data has replicas and shards together: all devices that the other axes "
        "leave; parallel.data_sharding says what is sharded over them, in groups of parallel.shards"),
    Row("dcn_data_parallelism dcn_fsdp_parallelism dcn_tensor_parallelism dcn_pipeline_parallelism "
        "dcn_context_parallelism dcn_expert_parallelism", note="the size of an axis here is its ici_ x its dcn_ size"),
    Row("cp cp_size context_parallel_size ici_context_parallelism parallelism.context_parallel_degree "
        "parallelism_config_cp_size", "parallel.context"),
    Row("ep ep_size expert_parallel_size expert_model_parallel_size ici_expert_parallelism "
        "parallelism.expert_parallel_degree", "parallel.expert",
        note="data-parallel devices: parallel.data x parallel.expert"),
    Row("enable_expert_parallel", note="--parallel.expert=N: devices that the experts are sharded over"),
    Row("sequence_parallel parallelism.enable_sequence_parallel", "parallel.sequence", SWITCH),
    Row("fsdp use_fsdp use_torch_fsdp2 use_megatron_fsdp ici_fsdp_parallelism dp_shard "
        "parallelism.data_parallel_shard_degree parallelism_config_dp_shard_size", "parallel.data_sharding",
        "false=replicate no_shard=replicate shard_grad_op=zero1 1=replicate *=fsdp",
        note="over parallel.data devices, which are all that the other axes leave"),
    Row("fsdp_sharding_strategy fsdp_reshard_after_forward data_parallel_sharding_strategy", "parallel.data_sharding",
        "full_shard=fsdp hybrid_shard=fsdp 1=fsdp true=fsdp optim_grads_params=fsdp shard_grad_op=zero1 2=zero1 "
        "false=zero1 optim=zero1 optim_grads=zero1 no_shard=replicate 3=replicate",
        note="hybrid: with --parallel.shards, the devices of a group"),
    Row("zero_stage zero_optimization zero_optimization.stage", "parallel.data_sharding",
        "0=replicate 1=zero1 2=zero1 3=fsdp", note="stages 1 and 2: zero1; 3: fsdp"),
    Row("use_distributed_optimizer shard_optimizer_over_data", "parallel.data_sharding", "false=replicate true=zero1"),
    Row("pipeline_schedule parallelism.pipeline_parallel_schedule", "parallel.schedule",
        "1f1b=1f1b interleaved1f1b=interleaved gpipe=gpipe"),
    Row("deepspeed use_deepspeed deepspeed_config deepspeed_config_file fsdp_config config_file accelerate_config "
        "job.config_file",
        note="one --config=FILE has all settings: parallel.data_sharding=zero1 is ZeRO-1, fsdp is ZeRO-3 or FSDP"),
    # Precision
    Row("bf16", "precision.compute", "true=bfloat16 false=float32"),
    Row("fp16", "precision.compute", "true=float16 false=float32"),
    Row("mixed_precision precision training.mixed_precision_param", "precision.compute", f"{DTYPES} fp8=bfloat16"),
    Row("weight_dtype training.dtype", "precision.params", note="master weights; precision.compute: as they are used"),
    Row("accumulate_allreduce_grads_in_fp32 grad_dtype", "precision.gradients",
        "bf16=bfloat16 fp32=float32 true=float32"),
    Row("training.mixed_precision_reduce", "precision.reduce"),
    Row("dtype torch_dtype", "precision.compute", f"{DTYPES} auto=bfloat16", flags="dtype inference.compute"),
    Row("fp8 fp8_format fp8_recipe", "precision.matmul", "true=Fp8Current hybrid=Fp8Current tensorwise=Fp8Current "
        "delayed=Fp8Delayed blockwise=Fp8Blocks mxfp8=Mxfp8", note="docs/fp8.md"),
    Row("compile torch_compile compile.enable training.compile enforce_eager", note="every step is compiled"),
    # Data
    Row("data_path train_data_path", "data.paths", by=token_files),
    Row("split", "data.split"),
    Row("mock_data", note="--data.type=Mock"),
    Row("dataset dataset_name dataset_path train_file training.dataset training.dataset_path dataset_type hf_path "
        "hf_train_files grain_train_files",
        note="text: python -m megajax.preprocess --input=FILE --output-prefix=PREFIX, then --data.type=Blend "
             "--data.paths=PREFIX; conversations: --data.type=Chat --data.paths=FILE.jsonl; docs/data.md"),
    Row("assistant_only_loss completion_only_loss sft_train_on_completion_only",
        note="--data.loss=answers, or all, of --data.type=Chat"),
    Row("tokenizer_name tokenizer_name_or_path tokenizer_path tokenizer_model model.tokenizer_path "
        "model.hf_assets_path hf_assets_path", "tokenizer.path", by=tokenizer, flags="tokenizer"),
    Row("tokenizer_type", "tokenizer.type", "gpt2bpetokenizer=GPT2Tokenizer llama2tokenizer=SentencePieceTokenizer "
        "tiktokenizer=TiktokenTokenizer bertwordpiecelowercase=WordPieceTokenizer sentencepiece=SentencePieceTokenizer "
        "tiktoken=TiktokenTokenizer huggingface=HuggingFaceTokenizer"),
    Row("num_workers dataloader_num_workers grain_worker_count", "data.loader.threads"),
    Row("data_seed data_shuffle_seed", "data.seed"),
    Row("training.seed debug.seed set_seed init_weights_seed", "seed"),
    Row("packing", note="rows of token files are always full; of conversations, --data.packing; docs/data.md"),
    # Checkpoints and logs
    Row("output_dir out_dir save save_dir ckpt_dir checkpoint_dir dump_folder job.dump_folder base_output_directory",
        "run_dir", flags="run_dir output to"),
    Row("checkpoint.folder checkpointer.folder", note="checkpoints are in RUN_DIR/checkpoints"),
    Row("run logdir", "run_dir", flags="run_dir from"),
    Row("output", "run_dir", flags="output_prefix to run_dir"),
    Row("input input_file", flags="input from", note="text for python -m megajax.preprocess --input=FILE"),
    Row("output_path output_file", "run_dir", flags="output to"),
    Row("run_name experiment_name",
        note="--run_dir=runs/NAME; of MaxText, a folder in base_output_directory; of wandb, logging.wandb.name"),
    Row("save_steps save_interval checkpoint_period checkpoint.interval checkpointer.interval", "checkpoint.every"),
    Row("save_strategy eval_strategy evaluation_strategy",
        note="steps between them: checkpoint.every, evaluation.every; none: a checkpoint at the end, no evaluation"),
    Row("enable_checkpointing enable_checkpoint checkpoint.enable checkpoint.enable_checkpoint",
        note="without checkpoints: --checkpoint.every=none --checkpoint.at_end=false"),
    Row("async_checkpointing async_save checkpoint.async_mode", "checkpoint.asynchronous",
        "disabled=false async=true async_with_pinned_mem=true true=true false=false"),
    Row("save_total_limit max_num_checkpoints_to_keep checkpoint.keep_latest_k checkpointer.keep_latest_k",
        "checkpoint.keep_last", "0=none none=none"),
    Row("load load_dir load_checkpoint load_full_state_path ckpt_path checkpoint_path run_dir", "checkpoint.load",
        flags="run from", note="a run's folder, or hf:DIR; without it, a run continues from its own run_dir"),
    Row("load_parameters_path checkpoint.initial_load_path checkpointer.initial_load_path", "checkpoint.load",
        flags="run from", note="a run's folder, or hf:DIR; weights alone with --checkpoint.parts=weights"),
    Row("finetune no_load_optim checkpoint.initial_load_model_only", "checkpoint.parts", "true=weights false=all"),
    Row("resume resume_from_checkpoint auto_resume init_from",
        note="a run continues from the newest checkpoint of its run_dir; from another run, or from weights: "
             "--checkpoint.load=RUN or hf:DIR"),
    Row("overwrite_output_dir", note="a run_dir with checkpoints is continued: give another run_dir, or delete it"),
    Row("eval_steps", "evaluation.every",
        note="steps between evaluations; of MaxText, batches of each: evaluation.batches"),
    Row("eval_interval eval_freq validation.freq", "evaluation.every", "-1=none",
        note="steps between evaluations; batches of each: evaluation.batches"),
    Row("eval_iters max_eval_batches validation.steps", "evaluation.batches",
        note="all rows of the split: --evaluation.full"),
    Row("logging_steps log_interval log_freq steps_per_print metrics.log_freq", "logging.every"),
    Row("log_period", note="metrics.jsonl has every step; logging.every: steps between lines at the terminal"),
    Row("report_to", note="--logging.tensorboard, or --logging.wandb.project=NAME"),
    Row("tensorboard tensorboard_dir logging_dir enable_tensorboard metrics.enable_tensorboard", "logging.tensorboard",
        "false=false *=true", note="in RUN_DIR/tensorboard"),
    Row("wandb_project wandb_project_name", "logging.wandb.project"),
    Row("wandb_run_name wandb_exp_name", "logging.wandb.name"),
    Row("wandb_log use_wandb enable_wandb metrics.enable_wandb", "logging.wandb.mode", "true=online false=disabled"),
    Row("push_to_hub hub_model_id", note="python -m megajax.convert --from=RUN --to=hf:DIR writes a folder to upload"),
    # Models of generate, serve, evaluate and convert
    Row("model_name_or_path pretrained_model_name_or_path model_name model_path model pretrained model_args base_model "
        "hf_model", "checkpoint.load", "hf=DIR", by=pretrained, flags="hf from"),
    Row("model.name model.flavor", note="a size is a function of a config file: --config=llama3.py:llama3_8b"),
    Row("peft peft_model lora_path", flags="adapter", values="true=DIR", note="a PEFT folder"),
    Row("trust_remote_code", note="code of a model folder is never run"),
    Row("max_new_tokens max_gen_toks n_predict max_output_tokens", flags="max_tokens"),
    Row("num_beams", flags="beams"),
    Row("num_return_sequences", flags="n"),
    Row("do_sample", flags="temperature", values="false=0 true=1"),
    Row("max_model_len ctx_size", "inference.length"),
    Row("max_num_seqs max_batch_size", "inference.rows", flags="rows"),
    Row("max_num_batched_tokens", "inference.chunk", note="tokens of prompts in a step"),
    Row("gpu_memory_utilization mem_fraction_static", "inference.memory_share",
        note="a share of the memory that the weights leave; of all memory there"),
    Row("kv_cache_dtype", "inference.cache_dtype", "fp8_e4m3=fp8 auto=none"),
    Row("num_speculative_tokens speculative_num_draft_tokens prompt_lookup_num_tokens", "inference.speculate",
        note="drafts from the text of the request, or with inference.drafts=mtp by the model's heads"),
    Row("speculative_config", note="--inference.speculate=4: drafts from the text of the request, or with "
        "--inference.drafts=mtp by the model's heads"),
    Row("served_model_name", "server.name"),
    Row("lora_modules", flags="adapters"),
    Row("max_loras", "inference.adapters"),
    Row("max_lora_rank", "inference.adapter_rank"),
    Row("enable_lora", note="--adapters=NAME=DIR, or --inference.adapters=4 for adapters that are loaded later"),
    Row("api_key", flags="api_key_file", values="*=FILE"),
    Row("num_fewshot", note="--tasks=lm-eval:NAME:fewshot=N"),
    Row("limit", note="--tasks=lm-eval:NAME:limit=N"),
    Row("do_train do_eval do_predict", note="verbs: python -m megajax.train, evaluate, generate"),
    # Devices and processes
    Row("device hardware", flags="devices", values="cuda=gpu cuda:0=gpu gpu_multiprocess=gpu cpu=cpu"),
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


def matches(setting: str, name: str) -> bool:
    """Whether a setting of a config is this one: of any block, segment, encoder, and cross-attention."""
    pattern = re.escape(setting).replace(r"\.N\.", r"\.\d+\.").replace(r"\.mixer\.", r"\.(mixer|cross)\.")
    return re.fullmatch(pattern.replace(r"model\.stack", r"model\.(stack|encoder)(\.segments\.\d+)?"), name) is not None


def _length(stack: str, settings: Mapping[str, Any]) -> int:
    """Number of blocks in the pattern of a stack."""
    start = f"{stack}.pattern."
    return len({name.removeprefix(start).partition(".")[0] for name in settings if name.startswith(start)})
