"""The config of text with its middle at the end."""

from dataclasses import dataclass
from typing import ClassVar

from megajax.config.errors import Problem
from megajax.data.config.base import between
from megajax.data.config.text import BlendConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class FillInMiddleConfig(BlendConfig):
    """Token files whose documents are, in part, reordered so that a model learns to fill in the middle (FIM; Bavarian
    et al. 2022)."""

    target: ClassVar[str] = "megajax.data.fim:build_splits"

    rate: float = 0.5
    """Share of the documents that are reordered."""
    spm_rate: float = 0.5
    """Share of those with the suffix before the prefix (SPM); the others have prefix, suffix, middle (PSM)."""
    prefix_token: str = "<fim_prefix>"
    """Token before the prefix."""
    middle_token: str = "<fim_middle>"
    """Token before the middle."""
    suffix_token: str = "<fim_suffix>"
    """Token before the suffix."""
    fragment_token: str | None = None
    """Token at which documents are cut into fragments that are reordered one by one, such as the files of a repository;
    none: documents are reordered as a whole."""
    fragment_rate: float = 0.5
    """Share of the fragments that are reordered, in a document that is."""
    unchanged_prefix: str | None = None
    """Documents and fragments that begin with this text are not reordered."""
    sequential_draws: bool = False
    """Draw from one generator for all rows, in the order 0, 1, 2, …, as Megatron-LM does; a resumed run goes through
    the rows before it again. False: each row has a generator of its own."""

    def problems(self) -> list[Problem]:
        problems = BlendConfig.problems(self)
        for name in ("rate", "spm_rate", "fragment_rate"):
            problems += between(name, getattr(self, name), 0, 1)
        if self.isolate_documents:
            what = "needs the borders of the stored documents, which reordering moves"
            hint = "use reset_attention_mask and reset_positions, which go by end-of-document tokens"
            problems.append(Problem("isolate_documents", what, hint))
        return problems
