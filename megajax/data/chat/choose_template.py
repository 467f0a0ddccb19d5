"""The chat template of data: that of its settings, else that of the tokenizer's folder, else plain."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from megajax.config.errors import UserError
from megajax.config.hints import download_hint
from megajax.tokenizers.chat_template import ChatTemplate, template_text
from megajax.tokenizers.folder import SETTINGS, TEMPLATE, folder_template, tokenizer_folder

PLAIN = "plain"


def with_template[D](data: D, tokenizer: object) -> D:
    """Data settings with the template that they use: a text, a file or a name. Others than of messages as they are.

    tokenizer: settings of the run's tokenizer. Raises UserError for a folder without a template.
    """
    if not getattr(data, "has_messages", False):
        return data
    source = getattr(data, "template")  # noqa: B009, of any class with messages
    template = (
        folder_template(tokenizer_folder(tokenizer)) or PLAIN if source is None else of_folder(source, "data.template")
    )
    return replace(data, template=template)  # ty: ignore[invalid-argument-type]


def of_folder(source: str, setting: str) -> str:
    """The file with the template of a model's folder; the source of another template as it is.

    setting: that of the source. Raises UserError for a folder without a template, and for a model that is not here.
    """
    if "{" in source or not (folder := Path(source.removeprefix("hf:")).expanduser()).is_dir():
        if "{" not in source and not Path(source).exists() and (hint := download_hint(source)):
            raise UserError(f"{setting}={source!r}: there is no such folder; {hint}")
        return source
    if (file := folder_template(folder)) is None:
        raise UserError(
            f"{setting}={source!r}: this folder has no chat template, neither {TEMPLATE} nor chat_template in "
            f"{SETTINGS}. Name another folder, or plain, chatml or a file"
        )
    return file


def template_of(data: Any) -> ChatTemplate:
    """The template of data settings. Of settings that belong to no run, none is plain. Raises UserError."""
    return ChatTemplate(data.template or PLAIN)


def described(data: Any, tokenizer: object) -> tuple[str, str]:
    """The template of `with_template` for the banner, and a warning if the tokenizer's folder has another one.

    Both are "" for data without messages. Raises UserError for a template that can't be read.
    """
    if not getattr(data, "has_messages", False):
        return "", ""
    source, default = data.template or PLAIN, folder_template(tokenizer_folder(tokenizer))
    name = source if "{" not in source else "a text"
    if default is None:
        return f"{name}; the tokenizer's folder has none", ""
    if template_text(default) == template_text(source):
        return f"the tokenizer's own, {default}", ""
    warning = (
        f"warning: data.template, {name}, is not the tokenizer's own template, {default}: a model that was tuned on "
        "that one learns another format. data.template=none uses the tokenizer's own"
    )
    return f"{name}, not the tokenizer's own, {default}", warning
