"""The `tokenizers` library's tokenizer for the files of a model's folder, with the ids of transformers 5."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from megajax.config.errors import UserError
from megajax.config.optional_packages import require
from megajax.config.read_limits import parse_json, settings_of
from megajax.tokenizers.base import read_file, sentinel_name
from megajax.tokenizers.folder import ADDED, DEFAULTS, ROLES, SETTINGS, SPECIAL, VOCABULARIES, FolderTokens, token_text

SAVE = "Save the folder once with AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR), which writes tokenizer.json."
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""The pattern by which Qwen's tokenizers split text."""
MOST_SENTINELS = 10_000
"""T5 has 100. Each is a token of the vocabulary that is built."""
MOST_LETTERS = 10**8
"""Sum of the squares of the lengths of pieces. Those of Llama 2 add up to 10**6."""
SPACE = "▁"
"""SentencePiece's sign for a space."""


type Added = list[tuple[str, bool]]
"""Pieces that are added tokens, and whether they are special."""


def engine_of(tokens: FolderTokens) -> Any:
    """The tokenizer of a folder, without truncation and padding; its post-processor adds the tokens around a text.

    Raises UserError for files that are damaged, or not read exactly.
    """
    library = require("tokenizers", "The Hugging Face tokenizer")
    path, kind = tokens.vocabulary or tokens.folder / "tokenizer.json", tokens.kind
    for name in (SETTINGS, SPECIAL, ADDED):
        _demand_object(tokens.folder / name)
    more: Added = []
    if is_json := path.name not in VOCABULARIES[1:]:
        engine = _from_json(library, path)
        if kind in SPLITTERS:
            # As transformers 5 does, even if the file splits a text otherwise.
            _set_parts(library, engine, tokens)
        if kind in ("LlamaTokenizer", "CodeLlamaTokenizer") and isinstance(engine.model, library.models.BPE):
            _read_as_llama(library, engine, tokens)
    elif (make := READERS.get((path.name, kind))) is None:
        of = f"class {kind}" if kind else "a folder that names no class of tokenizer"
        raise UserError(f"{path}: {path.name} of {of} is not read exactly. {SAVE}")
    else:
        try:
            engine, more = make(library, path, tokens)
        except UserError:
            raise
        # The package raises bare Exceptions here too.
        except Exception as error:
            raise UserError(f"{path}: not a vocabulary of {kind} that can be read: {error}.") from error
    engine.no_truncation()
    engine.no_padding()
    engine.encode_special_tokens = False
    _add_tokens(library, engine, tokens, more)
    if not is_json or kind in AROUND:
        engine.post_processor = _post_processor(library, engine, tokens)
    return engine


def _demand_object(path: Path) -> None:
    """Raises UserError for a file of settings that is not a JSON object; it may be missing."""
    if not path.is_file():
        return
    try:
        content = parse_json(read_file(str(path), path.name), unique=False)
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON: {error}.") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: a JSON {type(content).__name__}, not an object.")


def _from_json(library: ModuleType, path: Path) -> Any:
    data = read_file(str(path), "tokenizer.json")
    try:
        engine = library.Tokenizer.from_str(data.decode("utf-8"))
    # The package raises bare Exceptions for all problems of the file.
    except Exception as error:
        raise UserError(f"{path}: not a tokenizer.json that this version of tokenizers reads: {error}.") from error
    _demand_distinct_ids(path, data)
    return engine


def _demand_distinct_ids(path: Path, data: bytes) -> None:
    """Raises UserError if two tokens of a tokenizer.json have the same id; the library would keep one of them."""
    try:
        content = parse_json(data.decode("utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: {error}. Download the file again.") from error
    vocabulary = content["model"].get("vocab", {})
    pairs = list(vocabulary.items()) if isinstance(vocabulary, dict) else []
    pairs += [(token["content"], token["id"]) for token in content.get("added_tokens") or ()]
    names: dict[int, str] = {}
    for token, number in pairs:
        if names.setdefault(number, token) != token:
            raise UserError(
                f"{path}: the tokens {names[number]!r} and {token!r} both have the id {number}. Give each token an id "
                "of its own, the one that the model was trained with."
            )


def _read_as_llama(library: ModuleType, engine: Any, tokens: FolderTokens) -> None:
    """Sets what LlamaTokenizer makes itself: `legacy`, which CodeLlama's has not, decides whether each text after a
    special token has a space."""
    prefix = tokens.settings.get("add_prefix_space") is not False
    legacy = tokens.kind == "LlamaTokenizer" and tokens.settings.get("legacy", False)
    scheme = ("always" if legacy else "first") if prefix else "never"
    decoders = library.decoders
    strip = [decoders.Strip(content=" ", left=1)] if prefix else []
    engine.normalizer = None
    engine.pre_tokenizer = library.pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme=scheme, split=False)
    engine.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    engine.model.fuse_unk, engine.model.byte_fallback, engine.model.unk_token = True, True, None


def _byte_pairs(library: ModuleType, path: Path, tokens: FolderTokens) -> tuple[Any, Added]:
    """Of vocab.json and merges.txt."""
    vocabulary = parse_json(read_file(str(path), "vocabulary"))
    lines = read_file(str(path.with_name("merges.txt")), "list of merges").decode("utf-8").split("\n")
    pairs = [tuple(line.split()) for line in lines[lines[0].startswith("#version") :] if line.strip()]
    model = library.models.BPE(vocab=vocabulary, merges=pairs, fuse_unk=False)
    engine = library.Tokenizer(model)
    engine.decoder = library.decoders.ByteLevel()
    _set_parts(library, engine, tokens)
    return engine, []


AROUND = ("BertTokenizer", "RobertaTokenizer", "T5Tokenizer")
"""Classes that always add the same tokens around a text, whatever tokenizer.json adds."""
SPLITTERS = ("BertTokenizer", "GPT2Tokenizer", "Qwen2Tokenizer", "RobertaTokenizer")
"""Classes that replace how tokenizer.json normalizes and splits a text."""


def _set_parts(library: ModuleType, engine: Any, tokens: FolderTokens) -> None:
    """Sets how a class of `SPLITTERS` normalizes and splits a text."""
    settings, splits = tokens.settings, library.pre_tokenizers
    prefix = bool(settings.get("add_prefix_space", False))
    if tokens.kind == "BertTokenizer":
        engine.normalizer = library.normalizers.BertNormalizer(
            clean_text=True,
            handle_chinese_chars=bool(settings.get("tokenize_chinese_chars", True)),
            strip_accents=settings.get("strip_accents"),
            lowercase=bool(settings.get("do_lower_case", True)),
        )
        engine.pre_tokenizer = splits.BertPreTokenizer()
    elif tokens.kind == "Qwen2Tokenizer":
        engine.normalizer = library.normalizers.NFC()
        cut = splits.Split(library.Regex(QWEN2), behavior="isolated", invert=False)
        engine.pre_tokenizer = splits.Sequence([cut, splits.ByteLevel(add_prefix_space=prefix, use_regex=False)])
    else:
        engine.normalizer, engine.pre_tokenizer = None, splits.ByteLevel(add_prefix_space=prefix)


def _word_pieces(library: ModuleType, path: Path, tokens: FolderTokens) -> tuple[Any, Added]:
    """Of vocab.txt."""
    text = read_file(str(path), "WordPiece vocabulary").decode("utf-8", errors="replace")
    vocabulary = {line.rstrip("\r"): number for number, line in enumerate(text.removesuffix("\n").split("\n"))}
    engine = library.Tokenizer(library.models.WordPiece(vocabulary, unk_token=tokens.names["unk_token"]))
    _set_parts(library, engine, tokens)
    engine.decoder = library.decoders.WordPiece(prefix="##")
    return engine, []


def _sentence_pieces(library: ModuleType, path: Path, tokens: FolderTokens) -> tuple[Any, Added]:
    """Of a SentencePiece model."""
    model = require("sentencepiece.sentencepiece_model_pb2", "A SentencePiece model").ModelProto()
    model.ParseFromString(read_file(str(path), "SentencePiece model"))
    pieces, charsmap = model.pieces, model.normalizer_spec.precompiled_charsmap
    kinds = model.SentencePiece
    added = [(piece.piece, piece.type == kinds.CONTROL) for piece in pieces
             if piece.type in (kinds.CONTROL, kinds.USER_DEFINED)]  # fmt: skip
    if tokens.kind == "LlamaTokenizer":
        vocabulary = {piece.piece: number for number, piece in enumerate(pieces)}
        pairs = _merges(vocabulary)
        engine = library.Tokenizer(library.models.BPE(vocabulary, pairs, fuse_unk=True, byte_fallback=True))
        _read_as_llama(library, engine, tokens)
        return engine, added
    count = tokens.settings.get("extra_ids", 100)
    if not isinstance(count, int) or not 0 <= count <= MOST_SENTINELS:
        raise UserError(f"{tokens.folder}: extra_ids={count!r} is not a number of sentinels up to {MOST_SENTINELS:,}")
    sentinels = [sentinel_name(number) for number in reversed(range(count))]
    scores = [*((piece.piece, piece.score) for piece in pieces), *((name, 0.0) for name in sentinels)]
    engine = library.Tokenizer(library.models.Unigram(scores, unk_id=2, byte_fallback=False))
    if charsmap:
        engine.normalizer = library.normalizers.Precompiled(charsmap)
    spaces, splits = {"replacement": SPACE, "prepend_scheme": "always", "split": True}, library.pre_tokenizers
    engine.pre_tokenizer = splits.Sequence([splits.WhitespaceSplit(), splits.Metaspace(**spaces)])
    engine.decoder = library.decoders.Metaspace(**spaces)
    return engine, [*added, *((name, True) for name in sentinels)]


READERS: Mapping[tuple[str, str], Callable[[Any, Path, FolderTokens], tuple[Any, Added]]] = {
    **{("vocab.json", kind): _byte_pairs for kind in ("GPT2Tokenizer", "Qwen2Tokenizer", "RobertaTokenizer")},
    ("vocab.txt", "BertTokenizer"): _word_pieces,
    ("tokenizer.model", "LlamaTokenizer"): _sentence_pieces,
    ("spiece.model", "T5Tokenizer"): _sentence_pieces,
}
"""(File, class of transformers) -> makes the tokenizer."""


def _merges(vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    """Pairs of pieces that form a piece, by the id of that, then by length. Raises ValueError for too many."""
    pairs = []
    if (letters := sum(len(token) ** 2 for token in vocabulary)) > MOST_LETTERS:
        raise ValueError(f"its pieces are too long: the squares of their lengths add up to {letters:,}")
    for token, number in vocabulary.items():
        cuts = [(token[:place], token[place:]) for place in range(1, len(token))]
        known = [pair for pair in cuts if pair[0] in vocabulary and pair[1] in vocabulary]
        known.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        pairs += [(number, len(left), len(right), left, right) for left, right in known]
    pairs.sort(key=lambda pair: pair[:3])
    return [(left, right) for *_, left, right in pairs]


def _add_tokens(library: ModuleType, engine: Any, tokens: FolderTokens, more: Sequence[tuple[str, bool]]) -> None:
    """Adds the tokens that the settings list, then the named ones that are missing, in the order of transformers."""
    settings = tokens.settings
    is_json = (tokens.vocabulary or tokens.folder).name not in VOCABULARIES[1:]
    # Those that only a class names may be beyond the model's vocabulary.
    unnamed = DEFAULTS.get(tokens.kind, {}).keys() - settings.keys() if is_json else set()
    vocabulary = engine.get_vocab(with_added_tokens=True)
    names = [text for name, text in tokens.names.items() if name not in unnamed or text in vocabulary]
    extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or ()
    extra = [*(extra if isinstance(extra, list) else ())]
    extra += [library.AddedToken(text, normalized=False, special=special) for text, special in more]
    special = {*names, *(text for entry in extra if isinstance(text := token_text(entry) or entry, str))}
    listed: dict[int, Any] = {}
    decoder = settings.get("added_tokens_decoder")
    for number, entry in decoder.items() if isinstance(decoder, dict) else ():
        if isinstance(entry, dict) and str(number).isdecimal() and len(str(number)) < 10:
            listed[int(number)] = _added(library, entry)
    if decoder is None:
        for text, number in settings_of(tokens.folder / ADDED).items():
            if type(number) is int:
                listed[number] = library.AddedToken(text, normalized=text not in special, special=text in special)
    new = [listed[number] for number in sorted(listed)]
    known = {token.content for token in engine.get_added_tokens_decoder().values()} | {token.content for token in new}
    flags = {token_text(entry): entry for entry in map(settings.get, ROLES) if isinstance(entry, dict)}
    for entry in (*(flags.get(name, name) for name in names), *extra):
        token = _added(library, entry, special=True)
        if token.content not in known:
            known.add(token.content)
            new.append(token)
    for token in new:
        token.special = token.special or token.content in names
    before = {token.content for token in new if engine.token_to_id(token.content) is not None}
    engine.add_tokens(new)
    pairs = [(number, token.content) for number, token in sorted(listed.items()) if token.content not in before]
    wrong = [(number, name) for number, name in pairs if engine.token_to_id(name) != number]
    if wrong:
        number, name = wrong[0]
        raise UserError(
            f"{tokens.folder}: the added token {name!r} should have the id {number}, but is {engine.token_to_id(name)} "
            f"after the vocabulary: ids are missing before it. {SAVE}"
        )


def _added(library: ModuleType, entry: Any, *, special: bool = False) -> Any:
    """An added token by its settings, or of its text."""
    if isinstance(entry, library.AddedToken):
        return entry
    if isinstance(entry, str):
        return library.AddedToken(entry, special=special)
    flags = {name: entry[name] for name in ("single_word", "lstrip", "rstrip", "normalized") if name in entry}
    return library.AddedToken(str(token_text(entry)), special=special or bool(entry.get("special")), **flags)


def _post_processor(library: ModuleType, engine: Any, tokens: FolderTokens) -> Any:
    """What adds the tokens around a text, of a folder without tokenizer.json or of a class of `AROUND`."""
    names, settings, process = tokens.names, tokens.settings, library.processors
    first = [names["bos_token"]] * bool(settings.get("add_bos_token")) if "bos_token" in names else []
    last = [names["eos_token"]] * bool(settings.get("add_eos_token")) if "eos_token" in names else []
    if tokens.kind in ("BertTokenizer", "RobertaTokenizer"):
        first, last = [str(names.get("cls_token"))], [str(names.get("sep_token"))]
    elif tokens.kind == "T5Tokenizer":
        first, last = [], ["</s>"]
    ids = [(name, engine.token_to_id(name)) for name in {*first, *last}]
    if missing := [name for name, number in ids if number is None]:
        raise UserError(
            f"{tokens.folder}: {missing[0]}, which {tokens.kind} adds to texts, is not in the vocabulary. {SAVE}"
        )
    return process.TemplateProcessing(single=[*first, "$A", *last], special_tokens=ids)
