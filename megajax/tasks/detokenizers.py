"""Remove the spaces of word-tokenised texts, like Megatron-LM's tasks/zeroshot_gpt before scoring.

The replacements and their order are Megatron-LM's, to get its figures; some never match any text.
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
"""By the values of `megajax.tasks.config.WikitextConfig.detokenizer`."""


def detokenize(text: str, kind: str) -> str:
    """The text after all replacements of this kind, in order."""
    for pattern, replacement in REPLACEMENTS[kind]:
        text = text.replace(pattern, replacement) if isinstance(pattern, str) else pattern.sub(replacement, text)
    return text
