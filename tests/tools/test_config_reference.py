"""docs/config_reference.md is what the config classes say of themselves."""

import dataclasses

from megajax.config.constructors import config_classes
from megajax.tools.config_reference import PAGE, reference
from megajax.training.run_config import RunConfig


def test_the_page_is_up_to_date():
    same = PAGE.read_text(encoding="utf-8") == reference()
    assert same, "write it again: python -m megajax.tools.config_reference"


def test_every_class_and_field_is_there():
    text = reference()
    for cls in config_classes(RunConfig):
        section = text.partition(f"\n## {cls.__name__}\n")[2].partition("\n## ")[0]
        assert f"from {cls.__module__} import {cls.__name__}\n" in section
        rows = [line.split(" | ") for line in section.splitlines() if line.startswith("| `")]
        fields = [field.name for field in dataclasses.fields(cls)]
        assert [row[0].strip("| `") for row in rows] == fields
        assert all(row[3].strip("| ") for row in rows), cls
