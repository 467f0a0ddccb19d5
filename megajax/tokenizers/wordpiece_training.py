"""Training of a WordPiece vocabulary."""

from collections import Counter
from collections.abc import Callable, Iterable

from megajax.config.errors import UserError
from megajax.config.missing import require
from megajax.tokenizers.wordpiece import CONTINUATION, NEEDED

MOST_CHARACTERS = 1000
"""Rarer characters become [UNK], as in the vocabularies of BERT."""


def train_vocabulary(texts: Callable[[], Iterable[str]], *, size: int, lower: bool = True) -> list[str]:
    """A WordPiece vocabulary of up to `size` tokens, the special ones first; the same for the same texts.

    Merges of the most frequent pairs of pieces (byte pair encoding), by the tokenizers library.

    Args:
        texts: gives the texts, twice.
        size: fewer come out if the texts have fewer.
        lower: lower-case the text and strip accents.

    Raises:
        UserError: texts without a word, a size below that of the alphabet, or the extra `tokenizers` not installed.
    """
    tokenizers = require("tokenizers", "Training of a vocabulary")
    engine = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="[UNK]"))
    engine.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=lower)
    engine.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    words = Counter(word for text in texts() for word in engine.normalizer.normalize_str(text).split())
    letters: Counter[str] = Counter()
    for word, count in words.items():
        for piece, _ in engine.pre_tokenizer.pre_tokenize_str(word):
            for place, letter in enumerate(piece):
                letters[CONTINUATION + letter if place else letter] += count
    kept = sorted(letters, key=lambda letter: (-letters[letter], letter))[:MOST_CHARACTERS]
    # A letter inside of words needs the same at their start: the trainer drops it otherwise.
    alphabet = sorted({letter.removeprefix(CONTINUATION) for letter in kept} | set(kept))
    tokens = [*NEEDED, *alphabet]
    if not alphabet:
        raise UserError("the text for a vocabulary has no word in it")
    if size < len(tokens):
        raise UserError(f"a vocabulary of {size} tokens: its characters and special tokens alone are {len(tokens)}")
    # The trainer numbers letters in an order that differs from run to run, but for those it is given.
    trainer = tokenizers.trainers.WordPieceTrainer(
        vocab_size=size, special_tokens=tokens, limit_alphabet=0, show_progress=False
    )
    engine.train_from_iterator(texts(), trainer)
    ids = engine.get_vocab(with_added_tokens=False)
    return sorted(ids, key=ids.__getitem__)
