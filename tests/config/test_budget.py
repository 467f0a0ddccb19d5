"""Limits of readers: what is counted, and the one message beyond a limit."""

import os

import pytest
from user_errors import user_error

from megajax.config.errors import UserError
from megajax.config.read_limits import Budget, Limits, OverBudget, parse_json, read_file, read_json


def test_beyond_a_limit_the_message_names_file_limit_and_remedy():
    budget = Budget("a/b.json", Limits(entries=10, bytes=1000, depth=2))
    budget.spend(10, bytes=1000)
    with user_error(kind=OverBudget) as caught:
        budget.spend(1)
    assert isinstance(caught.value, UserError) and isinstance(caught.value, ValueError) and caught.value.code == 2
    with user_error(kind=OverBudget):
        Budget("a", Limits(depth=2)).demand_tree([[[]]])


def test_shared_values_count_as_often_as_they_are_reached():
    tree: object = 1
    for _ in range(200):
        tree = {"a": tree, "b": [tree]}
    with user_error(kind=OverBudget):
        Budget("a", Limits(entries=10**6)).demand_tree(tree)
    Budget("a", Limits(entries=7)).demand_tree({"a": [1, 2], "b": (3, 4)})
    endless: list = []
    endless.append(endless)
    with user_error(kind=OverBudget):
        Budget("a", Limits()).demand_tree(endless)


@pytest.mark.parametrize("factor", ["0", "-1", "x", "1e3", "9999999999", ""])
def test_a_factor_that_is_no_number_is_refused(factor, monkeypatch):
    monkeypatch.setenv("MEGAJAX_READ_LIMITS", factor)
    with user_error():
        Budget("a", Limits())


def test_only_regular_files_of_limited_size_are_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/zero"):
        with user_error(kind=OverBudget):
            read_file(path)
    (tmp_path / "a.json").write_text('{"a": 1}')
    assert read_json(tmp_path / "a.json") == {"a": 1}
    with user_error(kind=OverBudget):
        read_json(tmp_path / "a.json", Limits(bytes=7))
    with user_error(kind=OverBudget):
        read_file("/dev/zero", pipes=True)
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "missing")
    with pytest.raises(IsADirectoryError):
        read_json(tmp_path)


@pytest.mark.parametrize("text", ["[" * 10**5, '{"a":' * 10**5, "9" * 5000, "{", '{"a": 1, "a": 1}'])
def test_json_of_strangers_raises_value_error(text):
    with pytest.raises(ValueError):
        parse_json(text)
