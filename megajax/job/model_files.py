"""The files that a run keeps beside its weights for an export: RUN/tokenizer.

They are those of the weights that the run starts from, except what the run has of its own: its tokenizer and its chat
template. Every later run copies them from there.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from megajax.checkpoint.huggingface.names import stored_extra, write_extra
from megajax.checkpoint.huggingface.tokenizer_files import (
    GENERATION,
    NAMES,
    OF_MODEL,
    OF_TOKENIZER,
    files_of,
    special_token_ids,
    vocabulary_files,
)
from megajax.checkpoint.named_files import demand_inside
from megajax.checkpoint.weights.provenance import FILES, Ancestor, Provenance
from megajax.config.budget import parse_json, read_file
from megajax.config.errors import UserError
from megajax.config.nearest import listed
from megajax.data.cache import atomic_write
from megajax.models.protocol import ids_below
from megajax.tokenizers.base import LIMITS, Tokenizer
from megajax.tokenizers.chat_template import TEMPLATE, template_text
from megajax.tokenizers.config import ByteTokenizerConfig, MultimodalTokenizerConfig, NullTokenizerConfig
from megajax.training.run_config import RunConfig


@dataclass(frozen=True)
class ModelFiles:
    """The files beside the weights of a new run. All processes decide the same; the first one writes."""

    cfg: RunConfig
    tokenizer: Tokenizer
    ancestor: Ancestor | None
    """The weights that the run starts from; None: random ones."""

    @property
    def provenance(self) -> Provenance:
        """The record for checkpoints of the run."""
        provenance = Provenance() if self.ancestor is None else self.ancestor.provenance
        if not self.differs:
            return provenance
        return replace(provenance, special_tokens=special_token_ids(self.tokenizer))

    @cached_property
    def differs(self) -> bool:
        """Whether the run's tokenizer differs from that of the weights, or there is none.

        A tokenizer that needs no files is the default of every config, so it does not replace one with files, unless
        the vocabulary changed.
        """
        config, vocabulary = self.cfg.tokenizer, ids_below(self.cfg.model)
        if vocabulary is None:
            return False
        if (ancestor := self.ancestor) is None:
            return not isinstance(config, NullTokenizerConfig)
        theirs = _contents(ancestor.files, OF_TOKENIZER)
        if isinstance(config, NullTokenizerConfig | ByteTokenizerConfig) and (theirs or ancestor.provenance.settings):
            return ancestor.vocabulary not in (None, vocabulary)
        if isinstance(config, MultimodalTokenizerConfig):
            grown = self.tokenizer.vocabulary_size > getattr(self.tokenizer, "base", self.tokenizer).vocabulary_size
            config = config if grown else config.base
        files = [read_file(path, LIMITS) for path in vocabulary_files(config).values()]
        if files and all(content in theirs.values() for content in files):
            return False
        try:
            return files_of(config, self.tokenizer)["tokenizer.json"] != theirs.get("tokenizer.json")
        except UserError:
            return True

    def write(self, run: Path) -> str:
        """Writes RUN/tokenizer. Returns a line about it; "" if all of it is the run's own. Raises OSError."""
        folder, lines = run / FILES, list[str]()
        paths = vocabulary_files(self.cfg.tokenizer).values()
        if any(path.resolve().is_relative_to(folder.resolve()) for path in paths):
            return ""  # the user's own files
        files = {} if self.ancestor is None else _contents(self.ancestor.files, OF_MODEL if self.differs else NAMES)
        if files and self.ancestor is not None:
            lines.append(f"{listed([*files])} of {self.ancestor.files}")
        try:
            tokenizer = files_of(self.cfg.tokenizer, self.tokenizer) if self.differs else {}
        except UserError as error:
            tokenizer = {}
            lines.append(f"no tokenizer, because {error}")
        if tokenizer:
            lines += [f"{listed([*tokenizer])} of the run's tokenizer"] * bool(lines)
            if GENERATION in files:
                files[GENERATION] = self._generation(files[GENERATION])
        files |= tokenizer
        if (template := self._template(files)) is not None:
            files[TEMPLATE] = template.encode()
            lines += [f"{TEMPLATE} of data.template"] * bool(lines)
        write_extra(None if self.ancestor is None else self.ancestor.extra or stored_extra(self.ancestor.files), folder)
        for name in NAMES:
            if name not in files:
                (folder / name).unlink(missing_ok=True)  # of an earlier attempt
        for name, content in files.items():
            with atomic_write(folder / name) as file:
                file.write(content)
        return f"for exports: {'; '.join(lines)}" if lines else ""

    def _generation(self, content: bytes) -> bytes:
        """generation_config.json with the special tokens of the run's tokenizer."""
        settings = parse_json(content, unique=False)
        if not isinstance(settings, dict):
            return content
        others = {name: value for name, value in settings.items() if not name.endswith("_token_id")}
        ids = {role: number for role, number in special_token_ids(self.tokenizer).items() if number is not None}
        return (json.dumps(others | ids, indent=2) + "\n").encode()

    def _template(self, files: Mapping[str, bytes]) -> str | None:
        """The chat template of the run's data; None if there is none or `files` have the same."""
        if (source := getattr(self.cfg.data, "template", None)) is None:
            return None
        text = template_text(source)
        if TEMPLATE in files:
            return None if files[TEMPLATE].decode() == text else text
        settings = parse_json(files.get("tokenizer_config.json", b"{}"), unique=False)
        return None if isinstance(settings, dict) and settings.get("chat_template") == text else text


def _contents(folder: Path, names: Collection[str]) -> dict[str, bytes]:
    """The existing files of `names` in a folder: name -> content. Raises UserError for links that lead out of it."""
    present = [name for name in names if (folder / name).is_file()]
    for name in present:
        demand_inside(folder / name)
    return {name: read_file(folder / name, LIMITS) for name in present}
