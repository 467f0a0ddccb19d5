"""The ranking of the site's search: what the worker of mkdocs-material 9 does with lunr, in Python.

Sections are scored one by one. A term of a query matches every word that begins with it. The score of a word in a field
is its rarity times its saturated count (BM25 with b = 0, so without the length of the field) times the field's boost
and the page's. A section's score grows if it holds every term, and if it is the page's first. Pages are listed by their
best section.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence, Set
from typing import Any

K1 = 1.2
"""How fast the count of a word saturates: lunr's default."""
TAG = re.compile(r"<[^>]*>")
STOP_WORDS = frozenset(
    re.findall(
        r"\w+",
        (
            "a able about across after all almost also am among an and any are as at be because been but by can cannot "
            "could dear did do does either else ever every for from get got had has have he her hers him his how "
            "however i if in into is it its just least let like likely may me might most must my neither no nor not of "
            "off often on only or other our own rather said say says she should since so some than that the their them "
            "then there these they this tis to too twas us wants was we were what when where which while who whom why "
            "will with would yet you your "
        ),
    )
)
"""lunr's words that are not indexed."""


class SiteSearch:
    """The index of a site, from the `search_index.json` that its build writes."""

    def __init__(self, built: Mapping[str, Any]):
        config = built["config"]
        self._separator = re.compile(config["separator"])
        self._boosts = {name: field["boost"] for name, field in config["fields"].items()}
        self._sections: Sequence[Mapping[str, Any]] = built["docs"]
        self._counts = [
            {name: Counter(self._words(section.get(name, ""))) for name in self._boosts} for section in self._sections
        ]
        holders: dict[str, int] = defaultdict(int)
        for fields in self._counts:
            for counts in fields.values():
                for word in counts:
                    holders[word] += 1
        total = len(self._sections)
        self._rarity = {
            word: math.log(1 + abs((total - count + 0.5) / (count + 0.5))) for word, count in holders.items()
        }

    def _words(self, text: str | Sequence[str]) -> list[str]:
        """Words of a field without tags of HTML, which also end words, and without stop words."""
        parts = text if isinstance(text, str) else " ".join(text)
        words = (word for part in TAG.split(parts) for word in self._separator.split(part.lower()))
        return [word for word in words if word and word not in STOP_WORDS]

    def pages(self, query: str) -> list[str]:
        """The pages that the site lists for a query, best first."""
        terms = self._separator.split(query.lower())
        matched = {word for word in self._rarity if word.startswith((*terms,))}
        best: dict[str, float] = {}
        for section, fields in zip(self._sections, self._counts, strict=True):
            page, _, anchor = section["location"].partition("#")
            score = self._score(matched, fields, section.get("boost", 1))
            if score > 0:
                held = sum(
                    any(word.startswith(term) for counts in fields.values() for word in counts) for term in terms
                )
                score *= 1 + ((not anchor) + held / len(terms)) ** 2
                best[page] = max(score, best.get(page, 0))
        return sorted(best, key=lambda page: -best[page])

    def _score(self, matched: Set[str], fields: Mapping[str, Counter[str]], boost: float) -> float:
        """Of all fields; each is divided by the length of the query's vector, which has the words that it matches."""
        total = 0.0
        for name, counts in fields.items():
            weights = (
                self._rarity[word] * (K1 + 1) * counts[word] / (K1 + counts[word]) for word in matched & counts.keys()
            )
            total += sum(weights) * self._boosts[name] * boost
        return total / math.sqrt(len(matched)) if matched else 0.0
