"""The files that a run keeps beside its weights for an export: RUN/tokenizer.

They are those of the weights that the run starts from, except what the run has of its own: its tokenizer and its chat
template. Every later run copies them from there.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from megajax.config.errors import UserError
from megajax.config.hints import listed
from megajax.config.read_limits import read_file, settings_in
from megajax.interop.weights.formats import FILES, FORMATS
from megajax.interop.weights.provenance import Ancestor, Provenance
from megajax.interop.weights.stored_model import stored_extra, write_extra
from megajax.models.protocol import ids_below
from megajax.storage.index_cache import atomic_write
from megajax.tokenizers.base import LIMITS, Tokenizer
from megajax.tokenizers.chat_template import template_text
from megajax.tokenizers.config import ByteTokenizerConfig, MultimodalTokenizerConfig, NullTokenizerConfig
from megajax.tokenizers.folder import GENERATION, SETTINGS, TEMPLATE, FolderTokens
from megajax.tokenizers.tokenizer_files import (
    NAMES,
    OF_MODEL,
    OF_TOKENIZER,
    OLD_TEMPLATE,
    contents_of,
    files_of,
    original_files,
    present_files,
    special_token_ids,
    vocabulary_files,
)
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
        return replace(provenance, special_tokens={**provenance.special_tokens, **self.special_tokens})

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
        theirs = contents_of(ancestor.files, OF_TOKENIZER)
        form = FORMATS.get(ancestor.provenance.format)
        is_complete = bool(theirs) or (form is not None and form.with_tokenizer)
        if is_complete and isinstance(config, NullTokenizerConfig | ByteTokenizerConfig):
            return ancestor.vocabulary not in (None, vocabulary)
        if isinstance(config, NullTokenizerConfig):
            return False
        if isinstance(config, MultimodalTokenizerConfig):
            grown = self.tokenizer.vocabulary_size > getattr(self.tokenizer, "base", self.tokenizer).vocabulary_size
            config = config if grown else config.base
        files = [read_file(path, LIMITS) for path in vocabulary_files(config).values()]
        if files:
            return not all(content in theirs.values() for content in files)
        try:
            return files_of(config, self.tokenizer)["tokenizer.json"] != theirs.get("tokenizer.json")
        except UserError:
            return True

    @cached_property
    def special_tokens(self) -> Mapping[str, int | None]:
        """The special tokens that the run changes: those of its tokenizer, or the end that its settings give."""
        if self.differs:
            return special_token_ids(self.tokenizer)
        end = getattr(self.cfg.tokenizer, "eod", None)
        if end is None or self.ancestor is None:
            return {}
        tokens, provenance = FolderTokens(self.ancestor.files), self.ancestor.provenance
        ids = [settings.get("eos_token_id") for settings in (provenance.settings, provenance.special_tokens)]
        known = {*tokens.ends, *(number for value in ids for number in (value if isinstance(value, list) else [value]))}
        return {} if end == tokens.end or self.tokenizer.eod in known else {"eos_token_id": self.tokenizer.eod}

    def write(self, run: Path) -> str:
        """Writes RUN/tokenizer. Returns a line about it; "" if all of it is the run's own. Raises OSError."""
        folder, lines = run / FILES, list[str]()
        paths = vocabulary_files(self.cfg.tokenizer).values()
        if any(path.resolve().is_relative_to(folder.resolve()) for path in paths):
            return ""  # the user's own files
        files = {} if self.ancestor is None else contents_of(self.ancestor.files, OF_MODEL if self.differs else NAMES)
        if files and self.ancestor is not None:
            lines.append(f"{listed([*files])} of {self.ancestor.files}")
        try:
            tokenizer = files_of(self.cfg.tokenizer, self.tokenizer) if self.differs else {}
        except UserError as error:
            tokenizer = original_files(self.cfg.tokenizer)  # for the run itself
            lines.append(f"no tokenizer.json: {error}")
        if tokenizer:
            lines += [f"{listed([*tokenizer])} of the run's tokenizer"] * bool(lines)
        elif self.special_tokens and SETTINGS in files:
            files[SETTINGS] = _changed(files[SETTINGS], {"eos_token": getattr(self.cfg.tokenizer, "eod", None)})
        if GENERATION in files and self.special_tokens:
            files[GENERATION] = _changed(files[GENERATION], self.special_tokens)
        files |= tokenizer
        if (template := self._template(files)) is not None:
            instead = ", instead of the source's" * any(name in files for name in (TEMPLATE, OLD_TEMPLATE))
            files[TEMPLATE] = template.encode()
            files.pop(OLD_TEMPLATE, None)  # it would be used instead
            lines += [f"{TEMPLATE} of data.template, which the run is trained with{instead}"] * bool(lines)
        write_extra(None if self.ancestor is None else self.ancestor.extra or stored_extra(self.ancestor.files), folder)
        for name in present_files(folder):
            if name not in files:
                (folder / name).unlink()  # of an earlier attempt
        for name, content in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(folder / name) as file:
                file.write(content)
        return f"for exports: {'; '.join(lines)}" if lines else ""

    def _template(self, files: Mapping[str, bytes]) -> str | None:
        """The chat template of the run's data; None if there is none or `files` have the same."""
        if (source := getattr(self.cfg.data, "template", None)) is None:
            return None
        text = template_text(source)
        if TEMPLATE in files:
            return None if files[TEMPLATE] == text.encode() else text
        template = _settings(files.get(SETTINGS, b"{}")).get("chat_template")
        entries = template if isinstance(template, list) else []
        named = {entry.get("name"): entry.get("template") for entry in entries if isinstance(entry, dict)}
        return None if text in (template, named.get("default")) else text


def _changed(content: bytes, changes: Mapping[str, Any]) -> bytes:
    """A JSON file with other settings. Those that are None are left out."""
    settings = {name: value for name, value in {**_settings(content), **changes}.items() if value is not None}
    return (json.dumps(settings, indent=2) + "\n").encode()


def _settings(content: bytes) -> dict[str, Any]:
    """The settings in a JSON file; {} if it is damaged, because they are optional."""
    with suppress(ValueError):
        return settings_in(content)
    return {}
