"""docs/config_reference.md matches the docs of the config classes."""

import dataclasses

import pytest

from megajax.config.errors import UserError
from megajax.config.python_file import config_classes
from megajax.tools import config_reference
from megajax.tools.config_reference import PAGE, reference
from megajax.training.run_config import RunConfig


def test_the_page_is_up_to_date():
    up_to_date = PAGE.read_text(encoding="utf-8") == reference()
    assert up_to_date, "regenerate it: python -m megajax.tools.config_reference"


def test_outside_of_a_checkout_the_tool_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(config_reference, "PAGE", tmp_path / "docs" / "page.md")
    with pytest.raises(UserError, match="in a checkout, but"):
        config_reference.main([])
    assert not list(tmp_path.iterdir())


def test_the_page_has_every_class_and_field():
    text = reference()
    for cls in config_classes(RunConfig):
        section = text.partition(f"\n## {cls.__name__}\n")[2].partition("\n## ")[0]
        assert "```python\nmj." in section
        rows = [line.split(" | ") for line in section.splitlines() if line.startswith("| `")]
        fields = [field.name for field in dataclasses.fields(cls)]
        assert [row[0].strip("| `") for row in rows] == fields
        assert all(row[3].strip("| ") for row in rows), cls
