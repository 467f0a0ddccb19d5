"""Pages of the site that are made of the source: settings, the Python API, notebooks."""

import dataclasses
import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import megajax as mj
from megajax.command_line.help import field_texts
from megajax.config import field_types
from megajax.config.python_file import config_classes
from megajax.server.config import ServingConfig
from megajax.tasks.config import KINDS
from megajax.training.run_config import RunConfig

HEAD = """# Every config class

[Configs](config.md) shows how to put a config together, and how to write values on the command line and in YAML.
`--help` of a command lists its settings too.

`import megajax as mj` gives all of them. They take their settings by name. A setting without a default must be given.
In Python, none is `None`, true and false are `True` and `False`, a list is a tuple (`("a", "b")`, or `("a",)` with one
entry), and pairs are a dict.
"""
API_HEAD = """# Python API

`import megajax as mj` gives these names, and every class of the [config reference](config_reference.md). Modules are
imported on first use. [A model of your own](own_model.md) and [the engine](inference.md) show longer programs.
"""
NOTEBOOKS_HEAD = """# Notebooks

For whoever learns by running cells. They run on a CPU in minutes, download nothing, and are stored with the outputs of
their own cells, of which the first lines are below; a test runs them.

```bash
uv run --extra plot --with jupyterlab jupyter lab notebooks
```
"""
PLAIN = """[`plain_training.py`](../notebooks/plain_training.py) makes mesh, layout, model, shardings, optimizer, rows,
step, loop, checkpoint and sample itself. Its losses are those of `megajax.train`, bit for bit."""
OUTPUT_LINES, OUTPUT_WIDTH = 10, 110
"""What is shown of the output of a section of a notebook."""


def reference() -> str:
    """The page: a table of contents, then a section for each class with all its fields."""
    in_runs = (*config_classes(RunConfig), *(cls for cls, _ in KINDS.values()), *config_classes(ServingConfig))
    # Models and losses beside the decoder are classes of open settings, which no field names.
    every = (*in_runs, *(getattr(mj, name) for name in sorted(dir(mj)) if name.endswith("Config")))
    classes = [*dict.fromkeys(every)]
    lines = [HEAD]
    lines += [f"- [{cls.__name__}](#{cls.__name__.lower()}): {_summary(cls)}" for cls in classes]
    for cls in classes:
        text, _, example = (inspect.getdoc(cls) or "").partition("Example:")
        lines += ["", f"## {cls.__name__}", "", " ".join(text.split()), "", f"```python\n{example.strip('`\n ')}\n```"]
        if fields := [field for field in field_types.fields(cls) if field.init]:
            texts, annotations = field_texts(cls), field_types.hints(cls)
            lines += ["", "| setting | type | default | meaning |", "|---|---|---|---|"]
            lines += [_row(field, annotations[field.name], texts.get(field.name, "")) for field in fields]
        else:
            lines += ["", "It has no settings."]
    return "\n".join(lines) + "\n"


def python_api() -> str:
    """The page of public names that are no config classes: presets of models, then all others."""
    values = {name: getattr(mj, name) for name in dir(mj) if not name.endswith("Config") and name != "__version__"}
    presets = {name for name, value in values.items() if value.__module__.startswith("megajax.models.presets")}
    lines = [API_HEAD]
    for title, names in (("Runs, files and helpers", values.keys() - presets), ("Presets of models", presets)):
        lines += ["", f"## {title}"]
        for name in sorted(names):
            text, _, example = (inspect.getdoc(values[name]) or "").partition("Example:")
            lines += ["", f"### {name}", "", f"```python\nmj.{name}{_signature(values[name])}\n```", "", text.strip()]
            lines += ["", f"```python\n{example.strip('`\n ')}\n```"] if example else []
    return "\n".join(lines) + "\n"


def notebooks(folder: Path, repository: str | None) -> str:
    """The page of notebooks: titles, first paragraphs, and, if the repository has an address, badges that open them."""
    lines = [NOTEBOOKS_HEAD]
    for path in sorted(folder.glob("*.ipynb")):
        first = "".join(json.loads(path.read_text(encoding="utf-8"))["cells"][0]["source"])
        title, _, text = first.partition("\n")
        lines += ["", f"## {title.lstrip('# ')}", "", text.strip(), "", f"[`{path.name}`](../notebooks/{path.name})"]
        if repository:
            address = f"https://colab.research.google.com/github/{repository}/blob/main/notebooks/{path.name}"
            lines[-1] += f" · [Open in Colab]({address}){{ .md-button }}"
        lines += _outputs(json.loads(path.read_text(encoding="utf-8"))["cells"])
    lines += ["", "## One file from top to bottom", "", PLAIN]
    return "\n".join(lines) + "\n"


def _outputs(cells: list[dict[str, Any]]) -> Iterator[str]:
    """The first lines that the cells of each section print, and its pictures, below the section's title."""
    sections: dict[str, tuple[list[str], list[str]]] = {"": ([], [])}
    for cell in cells:
        first = "".join(cell["source"]).partition("\n")[0]
        if cell["cell_type"] == "markdown" and first.startswith("## "):
            sections[first.lstrip("# ")] = ([], [])
        printed, pictures = [*sections.values()][-1]
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            text = "".join(output.get("text", [])) or "".join(data.get("text/plain", []))
            if "image/png" in data:
                pictures.append("".join(data["image/png"]).replace("\n", ""))
            elif "\x1b" not in text:  # colours of a terminal
                printed += [line[:OUTPUT_WIDTH].rstrip() for line in text.splitlines()]
    for title, (printed, pictures) in sections.items():
        if title and (printed or pictures):
            yield from ("", f"**{title}**")
        yield from ("", "```", *printed[:OUTPUT_LINES], "```") if printed else ()
        yield from (f"\n![{title}](data:image/png;base64,{picture})" for picture in pictures)


def _signature(value: object) -> str:
    """Of functions, with annotations as they are written; "" for classes, which say themselves how they are made."""
    return "" if isinstance(value, type) else str(inspect.signature(value))  # ty: ignore[invalid-argument-type]


def _row(field: dataclasses.Field, annotation: object, text: str) -> str:
    cells = (f"`{field.name}`", _type(annotation), _default(field), text)
    return f"| {' | '.join(' '.join(cell.split()).replace('|', '\\|') for cell in cells)} |"


def _type(annotation: object) -> str:
    """The type as in --help, with links to config classes."""
    text = field_types.help_text(annotation)
    list_members = tuple(
        member for kind in field_types.lists(annotation) for member in field_types.configs(field_types.entry(kind, 0))
    )
    for cls in (*field_types.configs(annotation), *list_members):
        text = re.sub(rf"\b{cls.__name__}\b", f"[{cls.__name__}](#{cls.__name__.lower()})", text)
    return text


def _default(field: dataclasses.Field) -> str:
    value = field_types.default(field)
    if value is dataclasses.MISSING:
        return "must be given"
    if field_types.is_config(value):
        changed = [
            f"{part.name}={_python(getattr(value, part.name))}"
            for part in dataclasses.fields(value)
            if getattr(value, part.name) != field_types.default(part)
        ]
        return f"`{type(value).__name__}({', '.join(changed)})`"
    return f"`{_python(value)}`"


def _python(value: Any) -> str:
    if isinstance(value, str):
        return json.dumps(value)
    return repr(value)


def _summary(cls: type) -> str:
    return " ".join((inspect.getdoc(cls) or "").split("\n\n")[0].split())
