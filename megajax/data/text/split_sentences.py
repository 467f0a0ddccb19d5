"""Rule-based splitting of text into sentences, for scripts with capital letters."""

import re
from collections.abc import Iterator

ABBREVIATED = (
    "adj al approx assoc ave bd capt cf cie co col corp dept dr ed eds esp est gen gov hon inc jr lt ltd maj messrs "
    "mme mr mrs ms mt pl prof pt pvt rep rev sen sgt sr st supt trans univ viz vs "
    "jan feb mar apr jun jul aug sep sept oct nov dec"
)
COUNTED = "art ch eq fig figs no nos nr op p pp sec vol vols"
ABBREVIATIONS = frozenset(ABBREVIATED.split())
"""Words whose period does not end a sentence."""
NUMBERED = frozenset(COUNTED.split())
"""Words whose period does not end a sentence before a number."""
END = re.compile(
    r"""
      (?<![.!?…]) (?P<mark>[.!?…]++) ["'”’»)\]]*+ (?P<gap>\s++) (?= ["'“‘«(\[]* (?P<next>\w) )   # before the next word
    | [。！？]+ [”’」』）]* \s*   # full-width
    | (?<!\s) [^\S\n]*+ \n (?: [^\S\n]*+ \n )+   # blank lines
    """,
    re.VERBOSE,
)
WORD = re.compile(r"[\w.]+\Z")


def split_sentences(document: bytes) -> Iterator[bytes]:
    """Nonempty sentences of UTF-8 text, without surrounding white space. Bytes of invalid UTF-8 are kept.

    A sentence ends at a blank line, at full-width marks, and at `.`, `!`, `?` or `…` before white space and a word that
    does not start with a lower-case letter. A period after an abbreviation, an initial (J. S. Bach) or a word with an
    inner period (U.S.) does not end a sentence.
    """
    text, start = document.decode("utf-8", errors="surrogateescape"), 0
    for end in END.finditer(text):
        if end["mark"] is None or _ends_sentence(text, end):
            yield from _stripped(text[start : end.end()])
            start = end.end()
    yield from _stripped(text[start:])


def _ends_sentence(text: str, end: re.Match[str]) -> bool:
    if end["gap"].count("\n") > 1:
        return True
    if end["next"].islower():
        return False
    if end["mark"] != ".":
        return True
    # Words are short; a long one is no abbreviation.
    word = WORD.search(text[max(0, end.start() - 20) : end.start()])
    if word is None:
        return True
    name = word[0].lower()
    if name in NUMBERED:
        return not end["next"].isdigit()
    is_initial = len(name) == 1 and word[0].isupper()
    return not (is_initial or "." in name or name in ABBREVIATIONS)


def _stripped(text: str) -> Iterator[bytes]:
    stripped = text.strip()
    if stripped:
        yield stripped.encode("utf-8", errors="surrogateescape")
