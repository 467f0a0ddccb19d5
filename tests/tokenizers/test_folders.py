"""The tokens of a model's folder are those of transformers: ids of texts and conversations, and special tokens."""

import hashlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from user_errors import user_error

from megajax.tokenizers.chat_template import ChatTemplate
from megajax.tokenizers.conversation import Conversation
from megajax.tokenizers.folder import FolderTokens
from megajax.tokenizers.tokenizer_files import tokenizer_config
from tests.tokenizers.folder_kinds import KINDS, token, write
from tests.tokenizers.hard_texts import TEXTS, WORDS

pytest.importorskip("tokenizers", reason="needs the extra `tokenizers`")
PIECES = (
    *WORDS, "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|l|>", "<|r|>", "<|b|>", "word", "<unk>",
    "norm alized", "<think>", "[MASK]", "<|end|>", "\u0111em", "na\u00efve", " ", "  ", "\n", "\t", "'S", "123456",
    "\u2581", "<extra_id_0>",
)  # fmt: skip
DIGESTS = """
    gpt2 062b4e62, gpt2_by_model 68e5ac3f, chatml 71834aba, qwen 371eed9c, llama3 2a823275, deepseek a3f4acf2,
    flags fdde8367, prefix_space 7fac52b9, around 9c019059, post_processor_wins eb2b846d, no_post_processor 71834aba,
    special_tokens_map 1c72561a, added_tokens 71834aba, decoder 52b55868, extra_special 71834aba, conflict 2f277edd,
    both_lists 13886c16, model_specific b686082c, split_special 5ad38773, no_settings 71834aba, jinja 71834aba,
    templates 71834aba, template_folder 71834aba, metaspace_first 9c5f3f6e, metaspace_always 2d689bdc,
    metaspace_never e1d54759, llama_first_true 542aabb6, llama_always_false 12f61147, llama_as_is 12f61147,
    llama_no_prefix eb6d9101, mistral 93aa2f12, code_llama 48d3be70, phi3 57cbbd6e, phi3_bytes 2ac79b67,
    gemma e1d54759, unigram 45b161d5, words 1faa7521, other_split 71834aba, other_prefix f4a9d005,
    other_digits 71834aba, other_qwen 371eed9c, other_gpt2 71834aba, other_qwen3 371eed9c, other_qwen2 371eed9c,
    sentencepiece 637f01da, sentencepiece_first f5856608, sentencepiece_added 0c06e133, t5 b4a8bf94,
    pair_gpt2 de010442, pair_qwen 5bf36c8d, pair_roberta 9928d941, vocab 274c1cef, vocab_lower 5abda460,
    gpt2_nfc 71834aba, bert_alone 5abda460, roberta_alone ffc4a50e
"""
RECORDED = dict(pair.split() for pair in DIGESTS.split(","))
"""Kind -> digest of the ids of transformers 5.24 for `texts` and `chats`."""
READ = [name for name, kind in KINDS.items() if not kind.refused]


def texts() -> list[str]:
    draw = random.Random(0)
    return [*TEXTS[:-1], *("".join(draw.choices(PIECES, k=draw.randint(1, 9))) for _ in range(190))]


def chats() -> list[tuple[list[dict[str, str]], bool]]:
    """Conversations without names of special tokens, and whether an answer's header follows."""
    draw, pieces = random.Random(1), [*(piece for piece in PIECES if piece[0] not in "<["), "hello"]
    roles = [[("user", "assistant")[turn % 2] for turn in range(count)] for count in (1, 1, 2, 3, 3, 5) * 3]
    texts = [["".join(draw.choices(pieces, k=draw.randint(1, 6))) for _ in turns] for turns in roles]
    return [
        ([{"role": role, "content": text} for role, text in zip(turns, line, strict=True)], len(turns) % 2 == 1)
        for turns, line in zip(roles, texts, strict=True)
    ]


def tokenizer_of(folder: Path) -> Any:
    return tokenizer_config([path.name for path in folder.iterdir()], folder, None, folder).build()


def conversation_of(folder: Path) -> Conversation | None:
    template = FolderTokens(folder).template
    return None if template is None else Conversation(ChatTemplate(str(template)), tokenizer_of(folder))


def answers(folder: Path) -> dict[str, Any]:
    """The answers in the form of those of ask_transformers.py."""
    tokenizer, conversation = tokenizer_of(folder), conversation_of(folder)
    ids = [[*tokenizer.prefix, *tokenizer.encode(text).tolist(), *tokenizer.suffix] for text in texts()]
    rendered = [] if conversation is None else [conversation.encode(chat, header=header) for chat, header in chats()]
    return {"texts": ids, "chats": rendered, "size": tokenizer.vocabulary_size}


def digest(answers: dict[str, Any]) -> str:
    parts = [answers[name] for name in ("texts", "chats", "size")]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:8]


@pytest.mark.parametrize("name", READ)
def test_ids_are_those_that_transformers_had(name, tmp_path) -> None:
    assert digest(answers(write(KINDS[name], tmp_path / name))) == RECORDED[name]


@pytest.mark.slow
def test_ids_are_those_of_transformers(tmp_path) -> None:
    """Set MEGAJAX_TRANSFORMERS to a Python that has transformers, unless this one has it."""
    python = os.environ.get("MEGAJAX_TRANSFORMERS", sys.executable)
    if subprocess.run([python, "-c", "import transformers"], capture_output=True).returncode:
        pytest.skip("needs transformers: set MEGAJAX_TRANSFORMERS to a Python that has it")
    folders = {name: write(KINDS[name], tmp_path / name) for name in READ}
    cases = {str(folder): {"texts": texts(), "chats": chats()} for folder in folders.values()}
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    script = Path(__file__).with_name("ask_transformers.py")
    asked = subprocess.run([python, script, tmp_path / "cases.json"], stdout=subprocess.PIPE, check=True, text=True)
    theirs = json.loads(asked.stdout)
    assert len(texts()) == 200 and len(folders) > 40
    for name, folder in folders.items():
        ours, expected = answers(folder), theirs[str(folder)]
        assert ours == {key: expected[key] for key in ours}, name
        assert digest(expected) == RECORDED[name], name


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.refused])
def test_what_is_not_read_exactly_is_refused(name, tmp_path) -> None:
    with user_error():
        tokenizer_of(write(KINDS[name], tmp_path / name))


def turns(ids: Sequence[int], controls: set[int]) -> list[list[int]]:
    """Special tokens, and the tokens between them."""
    parts: list[list[int]] = [[]]
    for number in ids:
        parts += [[number], []] if number in controls else []
        parts[-1] += [] if number in controls else [number]
    return parts


@pytest.mark.parametrize(
    "name", ["chatml", "flags", "llama3", "llama_as_is", "metaspace_always", "metaspace_first", "mistral", "phi3",
             "phi3_bytes", "prefix_space", "sentencepiece", "sentencepiece_added", "unigram"],
)  # fmt: skip
def test_names_of_special_tokens_in_messages_change_nothing_around(name, tmp_path) -> None:
    folder = write(KINDS[name], tmp_path / name)
    conversation, tokenizer = conversation_of(folder), tokenizer_of(folder)
    assert conversation is not None
    controls = {number for name, number in tokenizer.controls().items() if name != "<unk>"}
    before = [("user", "hello  x"), ("assistant", "fine\n y"), ("user", "ok")]
    for special in tokenizer.controls():
        for frame, place in [("{}", 0), ("say {} now", 1), ("a\n{}\nb", 2), (" {} ", 2)]:
            ids = []
            for word in ("un", special):
                contents = [frame.format(word) if n == place else text for n, (_, text) in enumerate(before)]
                messages = [{"role": role, "content": c} for (role, _), c in zip(before, contents, strict=True)]
                ids.append(conversation.encode(messages))
                learned = conversation.texts.tokenize(conversation.parts(messages))[0]
                assert learned.tolist() == conversation.encode(messages, header=False)
            plain, named = (turns(numbers, controls) for numbers in ids)
            assert len(plain) == len(named) and sum(a != b for a, b in zip(plain, named, strict=True)) == 1, special
            if name != "unigram":  # It has no token for every letter.
                assert tokenizer.decode(ids[1]) == tokenizer.decode(ids[0]).replace("un", special, 1)


def test_ends_names_and_templates(tmp_path) -> None:
    def folder(**files: Any) -> FolderTokens:
        for name in ("generation_config", "config", "tokenizer_config", "special_tokens_map"):
            (tmp_path / f"{name}.json").write_text(json.dumps(files.get(name, {})))
        return FolderTokens(tmp_path)

    several = {"eos_token_id": [250, 257]}
    assert folder(config=several).ends == {250, 257}
    assert folder(config={"text_config": several}).ends == {250, 257}
    assert folder(config=several, generation_config={"eos_token_id": 3}).ends == {3}
    assert folder(config={"eos_token_id": None}, generation_config={"eos_token_id": [True, "3", -1]}).ends == set()
    legacy = {"eos_token": token("</s>"), "pad_token": "<pad>"}
    assert folder(special_tokens_map=legacy).names == {"eos_token": "</s>", "pad_token": "<pad>"}
    assert folder(special_tokens_map=legacy, tokenizer_config={"added_tokens_decoder": {}}).names == {}
    qwen = {"tokenizer_class": "Qwen2TokenizerFast", "eos_token": "<|im_end|>", "pad_token": None}
    assert folder(tokenizer_config=qwen).names == {"eos_token": "<|im_end|>", "unk_token": "<|endoftext|>"}
    assert folder(tokenizer_config={"sep_token": "[SEP]"}).end == "[SEP]"
    assert folder(tokenizer_config={"chat_template": "x"}).template == tmp_path / "tokenizer_config.json"
    for model, kind in (("llama", "LlamaTokenizer"), ("mistral", "TokenizersBackend"), ("phi3", "TokenizersBackend")):
        files = {"tokenizer_config": {"tokenizer_class": "LlamaTokenizer"}, "config": {"model_type": model}}
        assert folder(**files).kind == kind
    (tmp_path / "tokenizer.json").write_text('{"decoder": {"type": "ByteLevel"}}')  # DeepSeek's
    assert folder(tokenizer_config={"tokenizer_class": "LlamaTokenizerFast"}).kind == "TokenizersBackend"


def test_a_copy_without_config_json_keeps_ends_and_class(tmp_path) -> None:
    folder = write(KINDS["mistral"], tmp_path / "source")
    (folder / "config.json").write_text(json.dumps({"model_type": "mistral", "eos_token_id": [1, 2]}))
    config = tokenizer_config([path.name for path in folder.iterdir()], tmp_path / "copy", None, folder)
    assert (config.ends, config.kind) == ((1, 2), "TokenizersBackend")
    (tmp_path / "copy").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "copy" / name).write_bytes((folder / name).read_bytes())
    copy, original = config.build(), tokenizer_of(folder)
    assert copy.identity == original.identity and copy.ends == original.ends == {1, 2}


def test_added_tokens_decode_to_their_own_text(tmp_path) -> None:
    from megajax.inference.detokenizer import Detokenizer

    tokenizer = tokenizer_of(write(KINDS["flags"], tmp_path / "flags"))
    for text in ("\u0111em", "na\u00efve caf\u00e9", "a \u0111em<|r|>na\u00efve \u732b"):
        ids = tokenizer.encode(text).tolist()
        stream = Detokenizer(tokenizer).stream([])
        assert tokenizer.decode(ids) == text == "".join(map(stream.add, ids)) + stream.end()


def test_tools_and_documents_that_are_absent_are_none(tmp_path) -> None:
    shown = ChatTemplate("{{ tools is none }} {{ documents is none }} {{ other is defined }}")
    for more in ({}, {"tools": [], "documents": []}, {"tools": None}):
        assert shown.render([], **more) == "True True False"
    for name in ("templates", "template_folder"):
        conversation = conversation_of(write(KINDS[name], tmp_path / name))
        assert conversation is not None
        question = [{"role": "user", "content": "the"}]
        ids = [conversation.encode(question, variables={"tools": tools}) for tools in ([], [{"name": "a"}])]
        assert len(ids[0]) + 1 == len(ids[1]) and ids[0] == ids[1][1:]


def test_a_text_after_an_image_begins_no_text(tmp_path) -> None:
    from megajax.tokenizers.config import HuggingFaceTokenizerConfig, MultimodalTokenizerConfig

    folder = write(KINDS["metaspace_first"], tmp_path / "folder")
    base = HuggingFaceTokenizerConfig(path=str(folder), eod="</s>")
    tokenizer, text = MultimodalTokenizerConfig(base=base, image="<img>").build(), base.build()
    expected = [*text.encode("the").tolist(), tokenizer.specials["image"], *text.encode("</s>quick").tolist()[1:]]
    assert tokenizer.encode("the<img>quick").tolist() == tokenizer.encode_spans("the<img>quick")[0].tolist() == expected
    assert max(tokenizer.encode("the<img>quick\ufdd6").tolist()) < tokenizer.vocabulary_size
