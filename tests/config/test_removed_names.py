"""Settings, flags and classes that left are refused by name, wherever they are given, with exit code 2."""

import pytest
from user_errors import user_error

from megajax.config import ConfigError, field_types, load, removed
from megajax.config.removed import REMOVED
from megajax.report import main as report

SENTENCE = "was removed: the moon pulls well enough (tides=True)"


@pytest.fixture(autouse=True)
def table(monkeypatch):
    names = ("BatchConfig.tide", "tide_table", "TideConfig", "RopeConfig.moon")
    monkeypatch.setattr(removed, "REMOVED", dict.fromkeys(names, SENTENCE))


def test_a_setting_of_one_class():
    with user_error("model.stack.pattern.0.mixer.rope.moon", kind=ConfigError):
        load("quickstart.py", "model.stack.pattern.0.mixer.rope.moon=3")
    with user_error("model.stack.pattern.0.mlp.moon", kind=ConfigError):
        load("quickstart.py", "model.stack.pattern.0.mlp.moon=3")


def test_a_class_as_a_type():
    for name in ("TideConfig", "tide"):
        with user_error("data.type", kind=ConfigError):
            load("quickstart.py", f"data.type={name}")


def test_a_flag_of_a_verb_without_a_config():
    with user_error(kind=ConfigError):
        report(["--tide-table=3"])


def test_python_configs(tmp_path):
    calls = ("mj.RunConfig(data=mj.TideConfig())", "mj.BatchConfig(tide=3)", "mj.RopeConfig(moon=3)")
    for number, call in enumerate(calls):
        file = tmp_path / f"mine_{number}.py"
        file.write_text(f"import megajax as mj\n\ndef config():\n    return {call}\n")
        with user_error() as error:
            load(str(file))
        assert error.value.code == 2


def test_every_removed_name_is_free():
    """A name that has come back no longer was removed."""
    import megajax as mj

    for name in REMOVED:
        owner, _, setting = name.rpartition(".")
        assert setting not in (field_types.hints(getattr(mj, owner)) if owner else dir(mj)), name
