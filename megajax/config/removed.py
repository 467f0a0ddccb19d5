"""Names that the last version had. Each is refused with one sentence; the table leaves with the next release."""

from collections.abc import Mapping
from types import MappingProxyType

from megajax.config.overrides import short_type

REMOVED: Mapping[str, str] = MappingProxyType(
    {
        "draft_hf": "was removed: drafts come from earlier text or the model's own heads (inference.drafts)",
        "draft_run": "was removed: drafts come from earlier text or the model's own heads (inference.drafts)",
        "assume": "was removed: bash decides the conditions of a script (--run-script)",
        "server.score_template": "was removed: pairs of texts are compared by their vectors (/v1/embeddings)",
        "server.score_answers": "was removed: pairs of texts are compared by their vectors (/v1/embeddings)",
        "kernel": "was removed from delta nets: plain JAX is their one kernel",
        "adapters": "was removed from plans of a server: they count weights and cache",
        "adapter_rank": "was removed from plans of a server: they count weights and cache",
    }
)
"""Setting (also below any parent), flag or class, with underscores -> the rest of the sentence."""


def removed(name: str) -> str:
    """What the table says of a setting, a flag or a class; "" if it says nothing."""
    sentences = {short_type(key): sentence for key, sentence in REMOVED.items()}
    parts = short_type(name).split(".")
    ends = (".".join(parts[start:]) for start in range(len(parts)))
    return next((sentences[end] for end in ends if end in sentences), "")
