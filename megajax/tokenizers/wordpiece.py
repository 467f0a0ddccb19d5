"""BERT's WordPiece: the tokenizer of a vocab.txt, and the training of such a vocabulary."""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable

import numpy as np

from megajax.config.errors import UserError
from megajax.config.optional_packages import require
from megajax.tokenizers.base import before_last_blank, read_file, sentinel_name
from megajax.tokenizers.config import WordPieceTokenizerConfig
from megajax.tokenizers.huggingface import LibraryTokenizer

NEEDED = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
"""Tokens that a vocabulary must have."""
ROLES = {"bos": "[BOS]", "eos": "[EOS]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
CONTINUATION = "##"
"""Pieces with this prefix continue the word before them."""
MOST_CHARACTERS = 1000
"""Rarer characters become [UNK] in a vocabulary that is trained, as in those of BERT."""


class WordPieceTokenizer(LibraryTokenizer):
    """WordPiece (Devlin et al. 2019): words and marks, each cut into the longest pieces of the vocabulary.

    As in Megatron-LM, [BOS], [EOS] and `extra_ids` sentinels follow the tokens of the file unless it has them, and
    [EOS] ends a document. Invalid UTF-8 is dropped. `decode` joins pieces, puts a space between words, and cannot
    restore case. Special tokens that appear in the text are plain text.

    Raises:
        UserError: a file that is missing or not a vocabulary, or lacks a special token; the extra `tokenizers` not
            installed.
    """

    def __init__(self, config: WordPieceTokenizerConfig):
        tokenizers = require("tokenizers", "The WordPiece tokenizer")
        data = read_file(config.vocabulary, "WordPiece vocabulary")
        ids = {token: number for number, token in enumerate(_read_vocabulary(config.vocabulary, data))}
        absent = [token for token in NEEDED if token not in ids]
        if absent:
            raise UserError(
                f"{config.vocabulary}: no token {', '.join(absent)}. A WordPiece vocabulary has one token in each "
                f"line, {', '.join(NEEDED)} among them."
            )
        sentinels = [sentinel_name(number) for number in range(config.extra_ids)]
        for token in ("[BOS]", "[EOS]", *sentinels):
            ids.setdefault(token, len(ids))
        self.specials = {role: ids[token] for role, token in ROLES.items()}
        self.pad, self.eod = ids["[PAD]"], ids["[EOS]"]
        self.sentinels = tuple(ids[token] for token in sentinels)
        self.vocabulary_size = len(ids)
        self.continues = np.array([token.startswith(CONTINUATION) for token in ids])
        # No tokens are added to the engine, so names of special tokens in the text are ordinary words.
        self.engine = tokenizers.Tokenizer(tokenizers.models.WordPiece(ids, unk_token="[UNK]"))
        self.engine.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=config.lower)
        self.engine.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
        self.engine.decoder = tokenizers.decoders.WordPiece(prefix=CONTINUATION, cleanup=False)
        case = "lower" if config.lower else "cased"
        self.identity = f"wordpiece:{hashlib.sha256(data).hexdigest()[:16]}:{case}:extra={config.extra_ids}"

    def split_point(self, data: bytes) -> int:
        """No word has a blank in it."""
        return before_last_blank(data)


def _read_vocabulary(path: str, data: bytes) -> list[str]:
    """Tokens by id: a line each."""
    try:
        lines = data.decode("utf-8").removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: this WordPiece vocabulary is not UTF-8: {error}.") from error
    numbers: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        first = numbers.setdefault(line.rstrip("\r"), number)
        if first != number:
            raise UserError(f"{path}, line {number}: token {line[:60]!r} is also in line {first}.")
    return list(numbers)


def train_vocabulary(texts: Callable[[], Iterable[str]], *, size: int, lower: bool = True) -> list[str]:
    """A WordPiece vocabulary of up to `size` tokens, the special ones first; the same for the same texts.

    Merges of the most frequent pairs of pieces (byte pair encoding), by the tokenizers library.

    Args:
        texts: returns the texts; called twice.
        size: maximum number of tokens.
        lower: lower-case the text and strip accents.

    Raises:
        UserError: texts without a word, a size below that of the alphabet, or the extra `tokenizers` not installed.
    """
    tokenizers = require("tokenizers", "Training of a vocabulary")
    engine = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="[UNK]"))
    engine.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=lower)
    engine.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    word_counts = Counter(word for text in texts() for word in engine.normalizer.normalize_str(text).split())
    letters: Counter[str] = Counter()
    for word, count in word_counts.items():
        for piece, _ in engine.pre_tokenizer.pre_tokenize_str(word):
            for place, letter in enumerate(piece):
                letters[CONTINUATION + letter if place else letter] += count
    frequent = sorted(letters, key=lambda letter: (-letters[letter], letter))[:MOST_CHARACTERS]
    # The trainer drops a letter inside words unless the same letter can begin a word.
    alphabet = sorted({letter.removeprefix(CONTINUATION) for letter in frequent} | set(frequent))
    tokens = [*NEEDED, *alphabet]
    if not alphabet:
        raise UserError("the text for a vocabulary has no word in it")
    if size < len(tokens):
        raise UserError(f"a vocabulary of {size} tokens: its characters and special tokens alone are {len(tokens)}")
    # The order in which the trainer numbers letters is not deterministic, unless they are given as special tokens.
    trainer = tokenizers.trainers.WordPieceTrainer(
        vocab_size=size, special_tokens=tokens, limit_alphabet=0, show_progress=False
    )
    engine.train_from_iterator(texts(), trainer)
    ids = engine.get_vocab(with_added_tokens=False)
    return sorted(ids, key=ids.__getitem__)
