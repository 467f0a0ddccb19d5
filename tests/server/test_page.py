"""The page of the server offers the features of its model, and the banner counts its weights."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from importlib.resources import files
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from browser import CHROMIUM, Browser
from served import Running, serving

from megajax.config import load
from megajax.inference.loaded_model import LoadedModel
from megajax.server.config import ServerConfig

NODE = shutil.which("node")


@pytest.fixture(scope="module", params=["plain", None], ids=["chat", "no chat template"])
def running(request: pytest.FixtureRequest) -> Iterator[tuple[Running, bool]]:
    with serving(ServerConfig(), template=request.param) as running:
        yield running, request.param is not None


def test_the_models_entry_lists_its_routes(running: tuple[Running, bool]) -> None:
    """What the page reads; a request to the route that it chooses is answered."""
    server, chats = running
    (card,) = server.ask("/v1/models", method="GET").json()["data"]
    assert (card["chat_template"], card["max_model_len"]) == (chats, 4096)
    assert "model.chat_template" in files("megajax.server").joinpath("page.html").read_text(encoding="utf-8")
    chat = server.ask("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1})
    assert chat.status_code == (200 if chats else 400)
    assert server.complete(prompt="def ", max_tokens=1).status_code == 200


@pytest.mark.skipif(NODE is None, reason="needs node")
def test_the_functions_of_the_page() -> None:
    """It opens with completions for a model without a chat template, and tells reasoning from content."""
    page = files("megajax.server").joinpath("page.html").read_text(encoding="utf-8")
    script = page.partition("<script>")[2].partition("</script>")[0].strip().removesuffix("start();")
    program = """
const elements = {};
const document = {getElementById: name => elements[name]};
const opened = template => {
  Object.assign(elements, {route: {options: [{}], value: "chat"}, max_tokens: {value: "256"}, prompt: {}});
  offer({chat_template: template, max_model_len: 100});
  return [elements.route.value, elements.route.options[0].disabled, elements.max_tokens.value];
};
const events = [{choices: [{delta: {reasoning_content: "x"}}]}, {choices: [{delta: {content: "a"}}]},
  {choices: [{text: "b"}]}, {choices: [], usage: {completion_tokens: 3}}];
console.log(JSON.stringify([opened(true), opened(false), events.map(event => added(JSON.stringify(event)))]));
"""
    answer = subprocess.run([str(NODE), "-"], input=script + program, capture_output=True, text=True, check=True)
    with_template, without, parts = json.loads(answer.stdout)
    assert (with_template, without) == (["chat", False, 100], ["text", True, 100])
    assert parts == [["", 0, True], ["a", 0, False], ["b", 0, False], ["", 3, False]]


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_the_first_send_is_answered(running: tuple[Running, bool]) -> None:
    server, chats = running
    with Browser(server.url) as browser:
        browser.wait("!!document.getElementById('send') && !document.getElementById('send').disabled")
        assert browser.value("document.getElementById('route').value") == ("chat" if chats else "text")
        assert browser.value("document.getElementById('route').options[0].disabled") is not chats
        browser.value("document.getElementById('prompt').value = 'def '")
        browser.value("document.getElementById('send').click()")
        browser.wait("/256 tokens in/.test(document.getElementById('status').textContent)")
        texts = browser.value("[...document.querySelectorAll('#talk article')].map(article => article.textContent)")
        # A continued text is one block with its prompt.
        first, last = texts if chats else ("def ", texts[0].removeprefix("def "))
        assert first == "def " and last.startswith("user: def " if chats else "def def ")
        assert len(texts) == 1 + chats and texts[0].startswith("def ")
        assert browser.value("document.getElementById('status').className") == ""


def test_the_banner_counts_weights_as_training_does() -> None:
    """The quickstart's token tables have 257 rows, padded to 384."""
    padded: Any = SimpleNamespace(cfg=load("quickstart.py").model, weights={"tokens": np.zeros((384, 128))})
    assert LoadedModel.parameter_count(padded) == 918_912
    padded.cfg = object()  # without facts
    assert LoadedModel.parameter_count(padded) == 384 * 128
