"""Settings of config.json without effect on a forward pass: kept for an export, and ignored otherwise.

A family that reads one of them takes it first. Settings that change what any implementation of a model computes, such
as a scale, a cap, a norm or a type of positions, do not belong here.
"""

from collections.abc import Collection
from fnmatch import fnmatchcase

UNUSED = frozenset({
    # Generation, initial values, dropout, caches, files and other heads.
    "architectures", "attention_dropout", "attn_pdrop", "auto_map", "cache_implementation", "dtype", "embd_pdrop",
    "hidden_dropout", "id2label", "initializer_factor", "initializer_range", "is_decoder", "is_encoder_decoder",
    "keys_to_ignore_at_inference", "label2id", "max_new_tokens", "model_type", "num_labels", "predict_special_tokens",
    "pretraining_tp", "problem_type", "processor_class", "resid_pdrop", "task_specific_params", "tokenizer_class",
    "torch_dtype", "use_bfloat16", "use_cache",
    # Settings of preprocessor_config.json, which families of vision models read.
    "image_mean", "image_std",
    # Older versions of transformers wrote all settings of generation and of outputs into config.json.
    "bad_words_ids", "begin_suppress_tokens", "chunk_size_feed_forward", "diversity_penalty", "do_sample",
    "early_stopping", "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "finetuning_task",
    "length_penalty", "max_length", "min_length", "no_repeat_ngram_size", "num_beam_groups", "num_beams",
    "num_return_sequences", "output_attentions", "output_hidden_states", "output_past", "output_scores", "prefix",
    "remove_invalid_values", "repetition_penalty", "return_dict", "return_dict_in_generate", "suppress_tokens",
    "temperature", "tf_legacy_loss", "top_k", "top_p", "torchscript", "typical_p",
    # The implementation of attention and of kernels.
    "attn_implementation", "flash_attention", "use_flash_attention", "use_flash_attention_2", "use_flash_attn",
    "use_liger_kernel", "use_sdpa",
    # Training: noise that is added to embeddings in training only, recomputation, lengths of rows, names and notes.
    "base_model", "base_model_name_or_path", "bf16", "fp16", "fp32", "gradient_checkpointing",
    "gradient_checkpointing_kwargs", "max_seq_length", "max_sequence_length", "model_id", "model_max_length",
    "model_name", "model_name_or_path", "name_or_path", "neftune_noise_alpha", "tokenizer_model_max_length",
    "tokenizer_name", "tokenizer_name_or_path", "tokenizer_padding_side", "unsloth_fixed", "use_unsloth",
    # Other runtimes and libraries that keep their own settings here.
    "neuron", "sentence_transformers", "transformers.js_config",
})  # fmt: skip
PATTERNS = ("_*", "*_version", "*_token_id")
"""Private fields of transformers and its users, versions of libraries, and ids of tokens for generation."""


def is_unused(name: str, patterns: Collection[str] = ()) -> bool:
    """Whether a setting that no family reads is known to have no effect. patterns: of further names without effect."""
    return name in UNUSED or any(fnmatchcase(name, pattern) for pattern in (*PATTERNS, *patterns))
