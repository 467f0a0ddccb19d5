"""The page of messages has the words of every refusal that a test names, and of no test that is gone."""

from pathlib import Path

import pytest
import user_errors
from user_errors import FILE, Messages, page, parse, user_error, without_places

from megajax.config.errors import ConfigError, Problem, UserError

ROOT = Path(__file__).parents[2]


def test_the_page_is_written_as_it_is_read() -> None:
    text = FILE.read_text(encoding="utf-8")
    assert page(parse(text)) == text
    odd = {"a.py::b[- x]": ["one\n- two\n\n  three", "four"], "a.py::a": ["five"]}
    assert parse(page(odd)) == {"a.py::a": ["five"], "a.py::b[- x]": ["four", "one\n- two\n\n  three"]}


def test_every_message_belongs_to_a_test() -> None:
    for test in parse(FILE.read_text(encoding="utf-8")):
        file, function = test.partition("::")[0], test.partition("[")[0].rpartition("::")[2]
        assert f"def {function}(" in (ROOT / file).read_text(encoding="utf-8"), test


def test_folders_of_a_run_are_named_and_not_written() -> None:
    folder = "/tmp/x/pytest-of-me/pytest-7"
    text = f"{folder}/popen-gw1/test_it0/a.json, {ROOT}/configs, ({folder}/test_it12)"
    assert without_places(text) == "TMP/a.json, REPOSITORY/configs, (TMP)"


@pytest.fixture
def golden(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Messages:
    """A page with two messages for the test that asks."""
    messages = Messages()
    messages.golden = {request.node.nodeid: ["steps: must be above 0, got 0", "no such file"]}
    monkeypatch.setattr(user_errors, "messages", lambda: messages)
    return messages


def test_other_words_settings_and_exit_codes_fail(golden: Messages) -> None:
    with user_error("steps") as caught:
        raise ConfigError([Problem("steps", "must be above 0, got 0")])
    assert isinstance(caught.value, ConfigError)
    with user_error():
        raise UserError("no such file")
    with pytest.raises(AssertionError, match="is not named first"), user_error("rows"):
        raise ConfigError([Problem("steps", "must be above 0, got 0")])
    with pytest.raises(AssertionError, match="other words"), user_error():
        raise UserError("there is no such file")
    error = UserError("no such file")
    error.code = 1
    with pytest.raises(AssertionError), user_error():
        raise error
    golden.update = True
    with user_error():
        raise UserError("there is no such file")
    assert "there is no such file" in next(iter(golden.seen.values()))
