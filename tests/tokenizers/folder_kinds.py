"""Small folders of tokenizers of many kinds, each as a published model has it: name -> its files."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.tokenizers.hard_texts import TEXT, train_sentencepiece

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token }}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }} {{ eos_token }}{% endif %}{% endfor %}"
)
PHI3 = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% if tools is not none %}TOOLS{% endif %}{% for m in messages %}<|start_header_id|>{{ m.role }}"
    "<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>{% endfor %}"
)
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3_SPLIT = QWEN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
DIGITS = {"type": "Digits", "individual_digits": True}
NAMED = {"bos_token": "<s>", "eos_token": "</s>"}
LINES = [TEXT, "it's IT'S we'll 12345 assistant user system [INST] \n\n\t x", TEXT.upper()]


def token(text: str, **flags: bool) -> dict[str, Any]:
    """An added token of tokenizer.json or tokenizer_config.json."""
    unset = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"content": text, **unset, "special": True, **flags}


def split(pattern: str) -> dict[str, Any]:
    """A pre-tokenizer of byte-level BPE by a pattern."""
    cut = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {"type": "Sequence", "pretokenizers": [cut, level]}


def around(*parts: str) -> dict[str, Any]:
    """A post-processor: names of tokens, and A for the text."""
    single = [{"Sequence": {"id": "A", "type_id": 0}} if part == "A" else {"SpecialToken": {"id": part, "type_id": 0}}
              for part in parts]  # fmt: skip
    return {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": {}}


@dataclass(frozen=True)
class Kind:
    """A folder: an engine trained on `LINES`, or a SentencePiece model, and changes to its files."""

    base: str
    """bytes, metaspace, unigram, words: tokenizer.json; bpe, spm_unigram: a model; pair, vocab: files of text."""
    added: tuple[Mapping[str, Any], ...] = ()
    """Added tokens of tokenizer.json, or of added_tokens_decoder."""
    json: Mapping[str, Any] = field(default_factory=dict)
    """Parts of tokenizer.json."""
    settings: Mapping[str, Any] | None = field(default_factory=lambda: NAMED)
    files: Mapping[str, Any] = field(default_factory=dict)
    refused: bool = False
    """Whether we do not read it; transformers does."""


IM = token("<|im_start|>"), token("<|im_end|>")
FLAGS = (
    token("<|l|>", lstrip=True), token("<|r|>", rstrip=True), token("<|b|>", lstrip=True, rstrip=True),
    token("word", single_word=True, special=False), token("norm alized", normalized=True, special=False),
    token("<think>", special=False), token("\u0111em", special=False), token("na\u00efve", special=False),
)  # fmt: skip
PHI = tuple(token(f"<|{name}|>", rstrip=True) for name in ("user", "assistant", "system", "end"))
HEADERS = tuple(token(f"<|{name}|>") for name in ("start_header_id", "end_header_id", "eot_id"))
META = {"type": "Metaspace", "replacement": "\u2581", "split": False}
OLD_LLAMA = {
    "pre_tokenizer": None,
    "normalizer": {"type": "Sequence", "normalizers": [
        {"type": "Prepend", "prepend": "\u2581"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}]},
}  # fmt: skip


def scheme(name: str) -> dict[str, Any]:
    return {"pre_tokenizer": {**META, "prepend_scheme": name}, "normalizer": None}


def named(kind: str | None, template: Any = LLAMA2, **more: Any) -> dict[str, Any]:
    return {**NAMED, **({"tokenizer_class": kind} if kind else {}), "chat_template": template, **more}


INFILLING = tuple(token(text) for text in ("\u2581<PRE>", "\u2581<MID>", "\u2581<SUF>", "\u2581<EOT>", "<FILL_ME>"))
FAST = "PreTrainedTokenizerFast"
MAP = {"eos_token": token("<|im_end|>"), "pad_token": "</s>", "additional_special_tokens": ["<|im_start|>"]}
NAMES_OF_QWEN = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "bos_token": None}
DECODER = {"added_tokens_decoder": True}
"""Stands for the added tokens with the ids after the vocabulary."""

KINDS: Mapping[str, Kind] = {
    # Byte-level BPE.
    "gpt2": Kind("bytes", settings=named("GPT2Tokenizer", CHATML)),
    "gpt2_by_model": Kind("bytes", settings=NAMED, files={"config.json": {"model_type": "gpt2"}}),
    "chatml": Kind("bytes", IM, settings=named(FAST, CHATML)),
    "qwen": Kind("bytes", IM, {"pre_tokenizer": split(QWEN), "normalizer": {"type": "NFC"}},
                 named("Qwen2Tokenizer", CHATML, **NAMES_OF_QWEN), {"config.json": {"model_type": "qwen3"}}),
    "llama3": Kind("bytes", HEADERS, {"pre_tokenizer": split(LLAMA3_SPLIT), "post_processor": around("<s>", "A")},
                   named(FAST, LLAMA3)),
    "deepseek": Kind("bytes", IM, {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [
                     DIGITS, {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
                              "use_regex": True}]}},
                     named("LlamaTokenizerFast", CHATML, add_bos_token=True, legacy=True),
                     {"config.json": {"model_type": "deepseek_v3"}}),
    "flags": Kind("bytes", (*FLAGS, *IM), settings=named(FAST, CHATML)),
    "prefix_space": Kind("bytes", IM, {"pre_tokenizer": {
                         "type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}},
                         named(FAST, CHATML)),
    "around": Kind("bytes", IM, {"post_processor": around("<s>", "A", "</s>")}, named(FAST, CHATML)),
    "post_processor_wins": Kind("bytes", IM, {"post_processor": around("<s>", "A")},
                                named(FAST, CHATML, add_bos_token=False)),
    "no_post_processor": Kind("bytes", IM, settings=named(FAST, CHATML, add_bos_token=True, add_eos_token=True)),
    "special_tokens_map": Kind("bytes", settings={"chat_template": CHATML},
                               files={"special_tokens_map.json": MAP}),
    "added_tokens": Kind("bytes", settings={**NAMED, "chat_template": CHATML},
                         files={"added_tokens.json": {"<|im_start|>": 0, "<|im_end|>": 1}}),
    "decoder": Kind("bytes", settings=named(FAST, CHATML, **DECODER), added=(*IM, *FLAGS)),
    "extra_special": Kind("bytes", settings=named(FAST, CHATML, extra_special_tokens=["<|im_start|>", "<|im_end|>"])),
    "conflict": Kind("bytes", IM, settings=named(FAST, CHATML, added_tokens_decoder={
        "420": token("<|im_start|>", lstrip=True, rstrip=True)})),
    "both_lists": Kind("bytes", IM, settings=named(FAST, CHATML, extra_special_tokens=["<|x|>"]),
                       files={"special_tokens_map.json": {"extra_special_tokens": ["<|r|>"]}}),
    "model_specific": Kind("bytes", settings=named(
        FAST, "{{ image_token }}" + CHATML, image_token="<|image|>", extra_special_tokens={"boi_token": "<|boi|>"})),
    "split_special": Kind("bytes", IM, settings=named(FAST, CHATML, split_special_tokens=True)),
    "no_settings": Kind("bytes", IM, settings=None, files={"chat_template.jinja": CHATML}),
    "jinja": Kind("bytes", IM, settings=named(FAST, "other"), files={"chat_template.jinja": CHATML}),
    "templates": Kind("bytes", IM, settings=named(FAST, [
        {"name": "tool_use", "template": "T" + CHATML}, {"name": "default", "template": CHATML}])),
    "template_folder": Kind("bytes", IM, settings=named(FAST, "other"), files={
        "chat_template.jinja": CHATML, "additional_chat_templates/tool_use.jinja": "T" + CHATML}),
    # SentencePiece's spaces in tokenizer.json.
    **{f"metaspace_{name}": Kind("metaspace", IM, scheme(name), named(FAST, CHATML))
       for name in ("first", "always", "never")},
    **{f"llama_{name}_{legacy}".lower(): Kind("metaspace", IM, scheme(name), named("LlamaTokenizer", legacy=legacy))
       for name, legacy in (("first", True), ("always", False))},
    "llama_as_is": Kind("metaspace", IM, OLD_LLAMA, named("LlamaTokenizerFast", legacy=False),
                        {"config.json": {"model_type": "llama"}}),
    "llama_no_prefix": Kind("metaspace", IM, OLD_LLAMA, named("LlamaTokenizer", add_prefix_space=False)),
    "mistral": Kind("metaspace", IM, OLD_LLAMA, named("LlamaTokenizer", legacy=False),
                    {"config.json": {"model_type": "mistral"}}),
    "code_llama": Kind("metaspace", (*IM, *INFILLING), {**OLD_LLAMA, "post_processor": around("<s>", "A")},
                       named("CodeLlamaTokenizer", legacy=True), {"config.json": {"model_type": "llama"}}),
    "phi3": Kind("metaspace", PHI, scheme("first"), named("LlamaTokenizer", PHI3, legacy=False),
                 {"config.json": {"model_type": "phi3"}}),
    "phi3_bytes": Kind("bytes", PHI, settings=named(FAST, PHI3)),
    "gemma": Kind("metaspace", IM, {
        "pre_tokenizer": {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious",
                          "invert": False},
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}}, named(FAST, CHATML)),
    # Other models of words.
    "unigram": Kind("unigram", IM, settings=named(FAST, CHATML)),
    "words": Kind("words", IM, settings=named(FAST, CHATML, bos_token=None, eos_token="[SEP]")),
    # Classes that replace how tokenizer.json splits a text.
    "other_split": Kind("bytes", IM, {"pre_tokenizer": split(QWEN)}, named("GPT2Tokenizer", CHATML)),
    "other_prefix": Kind("bytes", settings=named("GPT2Tokenizer", CHATML, add_prefix_space=True)),
    "other_digits": Kind("bytes", IM, {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [DIGITS, {
        "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}]}},
        named("GPT2Tokenizer", CHATML)),
    "other_qwen": Kind("bytes", IM, settings=named("Qwen2Tokenizer", CHATML, **NAMES_OF_QWEN)),
    **{f"other_{model}": Kind("bytes", IM, {"pre_tokenizer": split(LLAMA3_SPLIT)}, named(None, CHATML),
                             {"config.json": {"model_type": model}}) for model in ("gpt2", "qwen3")},
    "other_qwen2": Kind("bytes", IM, {"pre_tokenizer": split(LLAMA3_SPLIT)}, named("LlamaTokenizerFast", CHATML),
                        {"config.json": {"model_type": "qwen2"}}),
    # Without tokenizer.json.
    "sentencepiece": Kind("bpe", settings=named("LlamaTokenizer", add_bos_token=True, legacy=True)),
    "sentencepiece_first": Kind("bpe", settings=named("LlamaTokenizer", add_bos_token=True, legacy=False)),
    "sentencepiece_added": Kind("bpe", (*IM, *FLAGS[:5]), settings=named("LlamaTokenizer", CHATML, **DECODER)),
    "t5": Kind("spm_unigram", settings={"extra_ids": 5, "tokenizer_class": "T5Tokenizer"}),
    "pair_gpt2": Kind("pair", IM, settings=named("GPT2Tokenizer", CHATML, **DECODER)),
    "pair_qwen": Kind("pair", IM, settings=named("Qwen2Tokenizer", CHATML, **NAMES_OF_QWEN, **DECODER)),
    "pair_roberta": Kind("pair", settings={"tokenizer_class": "RobertaTokenizer"}),
    "vocab": Kind("vocab", settings={"tokenizer_class": "BertTokenizer", "do_lower_case": False}),
    "vocab_lower": Kind("vocab", settings={}, files={"config.json": {"model_type": "bert"}}),
    "gpt2_nfc": Kind("bytes", IM, {"normalizer": {"type": "NFC"}}, named("GPT2Tokenizer", CHATML)),
    "bert_alone": Kind("words", settings={"tokenizer_class": "BertTokenizer"}),
    "roberta_alone": Kind("bytes", settings={
        "tokenizer_class": "RobertaTokenizer", "mask_token": "</s>", "pad_token": "</s>"}),
    # Refused.
    "other_sentencepiece": Kind("bpe", settings=named("GemmaTokenizer"), refused=True),
    "other_pair": Kind("pair", settings=named("CLIPTokenizer", CHATML), refused=True),
    "pair_of_another_model": Kind("pair", settings=None, files={"config.json": {"model_type": "llama"}}, refused=True),
    "gaps": Kind("pair", settings=named("Qwen2Tokenizer", CHATML, added_tokens_decoder={
        "5000": token("<|im_start|>")}), refused=True),
}  # fmt: skip


def write(kind: Kind, folder: Path) -> Path:
    """The folder with its files."""
    folder.mkdir(parents=True)
    size = _vocabulary(kind.base, folder)
    file = folder / "tokenizer.json"
    settings = None if kind.settings is None else dict(kind.settings)
    if file.is_file():
        content = json.loads(file.read_text()) | dict(kind.json)
        listed = settings is not None and settings.get("added_tokens_decoder") is True
        content["added_tokens"] += [] if listed else [{"id": size + n, **t} for n, t in enumerate(kind.added)]
        for part in ((content["post_processor"] or {}).get("special_tokens", ()),):
            for name in ("<s>", "</s>") if part == {} else ():
                number = content["model"]["vocab"][name]
                content["post_processor"]["special_tokens"][name] = {"id": name, "ids": [number], "tokens": [name]}
        file.write_text(json.dumps(content))
    if settings is not None and settings.get("added_tokens_decoder") is True:
        settings["added_tokens_decoder"] = {str(size + n): t for n, t in enumerate(kind.added)}
    if settings is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    for name, value in kind.files.items():
        if name == "added_tokens.json":
            value = {text: size + number for text, number in value.items()}
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(value if isinstance(value, str) else json.dumps(value))
    return folder


def _vocabulary(base: str, folder: Path) -> int:
    """Writes the vocabulary -> its size."""
    library = pytest.importorskip("tokenizers", reason="needs the extra `tokenizers`")
    models, trainers, splits, decoders = library.models, library.trainers, library.pre_tokenizers, library.decoders
    if base in ("bpe", "spm_unigram"):
        path = folder / ("tokenizer.model" if base == "bpe" else "spiece.model")
        ids = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1} if base == "spm_unigram" else {}
        options = {"model_type": base.removeprefix("spm_"), "character_coverage": 1.0, "byte_fallback": base == "bpe"}
        train_sentencepiece(path, LINES * 20, vocab_size=400 if base == "bpe" else 90, **options, **ids)
        from sentencepiece import SentencePieceProcessor

        return len(SentencePieceProcessor(str(path)))
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"] if base in ("words", "vocab") else ["<unk>", "<s>", "</s>"]
    special += ["<|endoftext|>"] * (base in ("bytes", "pair"))
    options = {"special_tokens": special, "show_progress": False}
    letters = sorted({letter for line in LINES for letter in line if not letter.isspace()})
    if base in ("words", "vocab"):
        pieces = [*special, *letters, *(f"##{letter}" for letter in letters), "the", "quick", "##ick", "un", "##aff"]
        engine = library.Tokenizer(models.WordPiece({p: n for n, p in enumerate(pieces)}, unk_token="[UNK]"))
        engine.normalizer, engine.pre_tokenizer = library.normalizers.BertNormalizer(), splits.BertPreTokenizer()
        engine.decoder, trainer = decoders.WordPiece(), None
        engine.add_special_tokens(special)
    elif base == "unigram":
        pieces = [*special, "\u2581", *letters, "\u2581the", "\u2581qu", "ick", "ox", "\u2581\u2581"]
        scores = [(piece, 0.0 if piece in special else -float(n % 7) - 1) for n, piece in enumerate(pieces)]
        engine, trainer = library.Tokenizer(models.Unigram(scores, unk_id=0)), None
        engine.pre_tokenizer, engine.decoder = splits.Metaspace(), decoders.Metaspace()
        engine.add_special_tokens(special)
    elif base == "metaspace":
        engine = library.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        engine.pre_tokenizer = splits.Metaspace(split=False)
        engine.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
        options["special_tokens"] = [*special, *(f"<0x{value:02X}>" for value in range(256))]
        trainer = trainers.BpeTrainer(vocab_size=500, **options)
    else:
        engine = library.Tokenizer(models.BPE())
        engine.pre_tokenizer, engine.decoder = splits.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=splits.ByteLevel.alphabet(), **options)
    if trainer is not None:
        engine.train_from_iterator(LINES * 3, trainer)
    if base in ("pair", "vocab"):
        engine.model.save(str(folder))
        return engine.get_vocab_size(with_added_tokens=False)
    engine.save(str(folder / "tokenizer.json"))
    content = json.loads((folder / "tokenizer.json").read_text())
    content["added_tokens"] = [entry for entry in content["added_tokens"] if entry["content"] in special]  # no bytes
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return engine.get_vocab_size(with_added_tokens=True)
