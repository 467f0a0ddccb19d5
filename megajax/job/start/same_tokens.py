"""The token ids of a teacher or a reference model must mean the same texts as those of the run."""

from collections.abc import Callable
from pathlib import Path

from megajax.config.errors import UserError
from megajax.interop.formats import local_name, split_name
from megajax.interop.origin import run_config
from megajax.interop.tokenizer_files import tokenizer_config
from megajax.tokenizers.base import Tokenizer
from megajax.tokenizers.config import NullTokenizerConfig


def stored_tokenizer(source: Path) -> Tokenizer | None:
    """The tokenizer of a run or of FORMAT:DIR; None where it is not stored, or its code is not of MegaJAX."""
    try:
        format_name, folder = split_name(local_name(source))
        if format_name:
            config = tokenizer_config([path.name for path in folder.iterdir()], folder, None, folder)
        else:
            config = run_config(source, trusted=False).base.tokenizer
        return None if isinstance(config, NullTokenizerConfig) else config.build()
    except (UserError, OSError):
        return None


def other_token(run_tokenizer: Tokenizer, theirs: Tokenizer) -> int | None:
    """The first id that means different texts in two tokenizers; None: there is none.

    White space around tokens is left out, because decoders differ in it for a single token.
    """
    if run_tokenizer.identity == theirs.identity:
        return None
    shared = range(min(run_tokenizer.vocabulary_size, theirs.vocabulary_size))
    return next(
        (token for token in shared if run_tokenizer.decode([token]).strip() != theirs.decode([token]).strip()), None
    )


def demand_same_tokens(run_tokenizer: Tokenizer, source: Path, whose: str, say: Callable[[str], None]) -> None:
    """Raises UserError, which names a token that differs. Says so where the tokens can't be compared.

    whose: the role of the source's model.
    """
    theirs = stored_tokenizer(source)
    if theirs is None or run_tokenizer.identity.startswith("null:"):
        if split_name(source)[1].exists():  # otherwise loading the weights will tell
            say(f"{whose} {source}: its tokens are not compared with those of the run, because one has no tokenizer")
        return
    if (token := other_token(run_tokenizer, theirs)) is None:
        return
    texts = [f"{tokenizer.decode([token])!r} ({tokenizer.identity})" for tokenizer in (run_tokenizer, theirs)]
    raise UserError(
        f"{whose} {source} has another tokenizer: token {token} is {texts[0]} in this run, and {texts[1]} there. Set "
        f"tokenizer to that of {source}, and prepare the data with it, or take another model"
    )
