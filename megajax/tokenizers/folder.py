"""The tokens of a model's folder: one reader for all of its files, by the rules of transformers 5.

Files: tokenizer.json, or else tokenizer.model or spiece.model, vocab.json with merges.txt, or vocab.txt;
tokenizer_config.json, and for older folders special_tokens_map.json and added_tokens.json; generation_config.json and
config.json; chat_template.jinja.
"""

import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from megajax.config.class_references import resolve
from megajax.config.read_limits import Limits, read_file, settings_of

SETTINGS, GENERATION, TEMPLATE = "tokenizer_config.json", "generation_config.json", "chat_template.jinja"
ADDITIONAL = "additional_chat_templates"
"""Folder of templates with names, *.jinja."""
SPECIAL, ADDED = "special_tokens_map.json", "added_tokens.json"
ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Settings of special tokens, in the order in which transformers adds them."""
VOCABULARIES = (
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "vocab.txt",
)
"""Files of a vocabulary; the first one that is present is read."""
BACKEND = "TokenizersBackend"
"""The class of transformers that reads tokenizer.json as it is."""
BYTE_LEVEL = re.compile(rb'"type":\s*"ByteLevel"')
LIMITS = Limits(bytes=2**29)
"""Of a tokenizer's file; the largest published ones have less than 2**26 bytes."""
DEFAULTS: Mapping[str, Mapping[str, str]] = {
    "BertTokenizer": {
        "unk_token": "[UNK]", "sep_token": "[SEP]", "pad_token": "[PAD]", "cls_token": "[CLS]", "mask_token": "[MASK]",
    },
    "CodeLlamaTokenizer": {
        "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "prefix_token": "▁<PRE>",
        "middle_token": "▁<MID>", "suffix_token": "▁<SUF>", "eot_token": "▁<EOT>", "fill_token": "<FILL_ME>",
    },
    "GemmaTokenizer": {
        "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>", "mask_token": "<mask>",
    },
    "GPT2Tokenizer": dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>"),
    "LlamaTokenizer": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "Qwen2Tokenizer": dict.fromkeys(("eos_token", "unk_token", "pad_token"), "<|endoftext|>"),
    "RobertaTokenizer": {
        "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "sep_token": "</s>", "pad_token": "<pad>",
        "cls_token": "<s>", "mask_token": "<mask>",
    },
    "T5Tokenizer": {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"},
}  # fmt: skip
"""Class of transformers -> the special tokens that it has unless the settings name others."""
MODELS: Mapping[str, str] = {
    "BertTokenizer": "bert convbert distilbert electra ernie layoutlm megatron-bert nezha nomic_bert squeezebert",
    "GPT2Tokenizer": "blip-2 codegen dbrx emu3 gpt2 gpt_neo gptj jais2 opt phi starcoder2",
    "GemmaTokenizer": "gemma gemma2 gemma3 gemma3_text gemma3n gemma3n_text recurrent_gemma shieldgemma2 t5gemma",
    "Qwen2Tokenizer": "internvl ovis2 qwen2 qwen2_5_omni qwen2_5_vl qwen2_audio qwen2_moe qwen2_vl qwen3 qwen3_moe "
    "qwen3_next qwen3_omni_moe qwen3_vl qwen3_vl_moe",
    "RobertaTokenizer": "bart data2vec-text longformer roberta roberta-prelayernorm",
    "T5Tokenizer": "mt5 musicgen switch_transformers t5",
    BACKEND: "arctic aria canary ernie4_5 ernie4_5_moe flex_olmo fuyu glm glm4 glm4_moe glm4_moe_lite glm4v glm4v_moe "
    "got_ocr2 gpt_bigcode granite granitemoe granitemoehybrid granitemoeshared h2ovl_chat hyperclovax hyperclovax_vlm "
    "internlm2 internlm3 iquestcoder jamba kimi_k25 kimi_linear llava llava_next mimo_v2_flash minicpm3 minicpmv "
    "minimax_m2 ministral ministral3 mistral mistral3 mistral_large4 mixtral modernbert modernbert-decoder molmo "
    "molmo2 nemotron nystromformer olmo2 olmo3 olmo_hybrid opencua openvla paddleocr_vl persimmon phi3 phi3_v phimoe "
    "pixtral smolvlm stablelm step3_vl umt5 vipllava voxtral voxtral_realtime xlm-roberta-xl",
}
"""Class of transformers -> values of model_type in config.json for which it is the class of the tokenizer, or, for
`BACKEND`, is that whatever class the folder names."""
CLASSES = {model: kind for kind, models in MODELS.items() for model in models.split()}
"""model_type of config.json -> the class of its tokenizer in transformers, where the model decides it."""


class FolderTokens:
    """The tokens of a folder. Nothing but its files of settings is read; see `folder_engine.engine_of`.

    Args:
        folder: of the files.
        kind: the class of transformers that reads them; "": as the files say.
        file: of the vocabulary; None: the first of `VOCABULARIES`.
        of_model: read config.json; False: as in a copy of the tokenizer's files.
    """

    def __init__(self, folder: Path, kind: str = "", file: Path | None = None, *, of_model: bool = True):
        self.folder, self._kind, self._file = folder, kind, file
        self._model = settings_of(folder / "config.json") if of_model else {}

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Those of tokenizer_config.json, and of special_tokens_map.json unless the former lists added tokens."""
        settings = settings_of(self.folder / SETTINGS)
        legacy = {} if "added_tokens_decoder" in settings else settings_of(self.folder / SPECIAL)
        first, more = settings.get("extra_special_tokens"), legacy.get("extra_special_tokens")
        if isinstance(first, list) and isinstance(more, list):
            legacy = {**legacy, "extra_special_tokens": [*first, *more]}
        return settings | legacy

    @cached_property
    def kind(self) -> str:
        """The class of transformers that reads the files; "" if none is named."""
        if self._kind:
            return self._kind
        model = self._model
        named = [settings.get("tokenizer_class") for settings in (self.settings, model)]
        hub = next((name.removesuffix("Fast") for name in named if isinstance(name, str) and name), "")
        of_model = CLASSES.get(str(model.get("model_type")), "")
        if not hub or of_model == BACKEND or model.get("model_type") == "qwen2":  # whatever class a folder names
            return of_model
        has_bytes = hub == "LlamaTokenizer" and BYTE_LEVEL.search(self._vocabulary_data)  # as Llama 3's, DeepSeek's
        return BACKEND if hub in ("PreTrainedTokenizer", BACKEND) or has_bytes else hub

    @property
    def _vocabulary_data(self) -> bytes:
        """tokenizer.json; b"" without one that can be read."""
        try:
            return read_file(self._file or self.folder / "tokenizer.json", LIMITS)
        except (OSError, ValueError):
            return b""

    @property
    def of_model(self) -> bool:
        """Whether the folder has a model of a known type."""
        return "model_type" in self._model

    @cached_property
    def vocabulary(self) -> Path | None:
        """The file of the vocabulary; None without one."""
        if self._file is not None:
            return self._file
        paths = [self.folder / name for name in VOCABULARIES]
        return next((path for path in paths if path.is_file() and self._is_whole(path)), None)

    def _is_whole(self, path: Path) -> bool:
        return path.name != "vocab.json" or (self.folder / "merges.txt").is_file()

    @cached_property
    def names(self) -> dict[str, str]:
        """Setting -> special token: `ROLES`, and those of the model such as image_token."""
        named = {name: entry for name, entry in self.settings.items() if name.endswith("_token")}
        entries: dict[str, Any] = {**DEFAULTS.get(self.kind, {}), **named}
        extra = self.settings.get("extra_special_tokens")
        entries |= extra if isinstance(extra, dict) else {}
        texts = {name: token_text(entry) for name, entry in entries.items()}
        ordered = (*ROLES, *(name for name in texts if name not in ROLES))
        return {name: text for name in ordered if (text := texts.get(name)) is not None}

    @cached_property
    def ends(self) -> frozenset[int]:
        """Ids that end an answer by generation_config.json, or else by config.json; chat models have several."""
        for settings in (settings_of(self.folder / GENERATION), self._model):
            parts = settings, settings.get("text_config")
            for ids in (part.get("eos_token_id") for part in parts if isinstance(part, dict)):
                numbers = ids if isinstance(ids, list) else [ids]
                if tokens := frozenset(token for token in numbers if type(token) is int and token >= 0):
                    return tokens
        return frozenset()

    @property
    def end(self) -> str | None:
        """The token that ends a text; None if no file names one."""
        return self.names.get("eos_token") or self.names.get("sep_token")

    @property
    def splits_names(self) -> bool:
        """Whether names of special tokens in a text are ordinary text."""
        return self.settings.get("split_special_tokens") is True

    @property
    def template(self) -> Path | None:
        """The file with the chat template; None without one."""
        if (self.folder / TEMPLATE).is_file():
            return self.folder / TEMPLATE
        return self.folder / SETTINGS if settings_of(self.folder / SETTINGS).get("chat_template") else None


def token_text(entry: object) -> str | None:
    """A special token, written as a text or as a mapping with its `content`."""
    text = entry.get("content") if isinstance(entry, dict) else entry
    return text if isinstance(text, str) else None


def tokenizer_folder(config: object) -> Path | None:
    """The folder of the files that a tokenizer's settings name; None if they name none."""
    base = getattr(config, "base", config)
    path = getattr(base, "path", None) or getattr(base, "vocabulary", None)
    if not isinstance(path, str):
        return None
    place = resolve("megajax.tokenizers.base:local_path")(path)  # imports numpy
    return place if place.is_dir() else place.parent


def folder_template(folder: Path | None) -> str | None:
    """The path of the file with the chat template of a folder; None without one."""
    template = None if folder is None else FolderTokens(folder).template
    return None if template is None else str(template)
