"""Taking back the blanks of word-tokenised texts, as Megatron-LM's tasks/zeroshot_gpt does before it scores them.

The replacements and their order are Megatron-LM's, for its figures: some of them change nothing in any text.
"""

import re
from collections.abc import Sequence

type Replacement = tuple[str | re.Pattern[str], str]

WIKITEXT: Sequence[Replacement] = (
    ("s '", "s'"),
    (re.compile(r"/' [0-9]/"), "/'[0-9]/"),
    (" @-@ ", "-"),
    (" @,@ ", ","),
    (" @.@ ", "."),
    *((f" {mark} ", f"{mark} ") for mark in ":;.!?,"),
    (re.compile(r"\(\s*([^)]*?)\s*\)"), r"(\1)"),
    (re.compile(r"\[\s*([^\]]*?)\s*\]"), r"[\1]"),
    (re.compile(r"\{\s*([^}]*?)\s*\}"), r"{\1}"),
    (re.compile(r'"\s*([^"]*?)\s*"'), r'"\1"'),
    (re.compile(r"'\s*([^']*?)\s*'"), r"'\1'"),
    ("= = = =", "===="),
    ("= = =", "==="),
    ("= =", "=="),
    (" \N{DEGREE SIGN} ", "\N{DEGREE SIGN}"),
    (" \n", "\n"),
    ("\n ", "\n"),
    (" N ", " 1 "),
    (" 's", "'s"),
)
PENN_TREEBANK: Sequence[Replacement] = (
    (" '", "'"),
    (" \n", "\n"),
    ("\n ", "\n"),
    (" n't", "n't"),
    (" N ", "1 "),
    ("$ 1", "$1"),
    ("# 1", "#1"),
)
REPLACEMENTS = {"wikitext": WIKITEXT, "ptb": PENN_TREEBANK, "none": ()}
"""By the names of `megajax.tasks.config.WikitextConfig.detokenizer`."""


def detokenize(text: str, kind: str) -> str:
    """The text after the replacements of this kind, one after another."""
    for old, new in REPLACEMENTS[kind]:
        text = text.replace(old, new) if isinstance(old, str) else old.sub(new, text)
    return text
