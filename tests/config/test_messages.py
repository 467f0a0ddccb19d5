"""Every `Problem` reads as a sentence after "setting: "; its message is found in the source."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import megajax

LIBRARY = Path(megajax.__file__).parent
CONJUNCTIONS = {"and", "or", "but", "with", "which", "that", "because", "of", "for", "to", "by", "as"}
VERB = re.compile(
    r"\b(is|are|be|must|needs?|ha[sd]|have|cannot|can't|does|do|would|names?|reads?|takes?|given|expected|got|keeps|hides"
    r"|shards?|shows|exceeds|contains|puts|sets|disables|determines?|contradicts?|replaces|stays|writes|fills|makes|changes"
    r"|begins?|ends?|come|came|counts?|refuses|differ|joins|divide|applies|lacks|leaves|leave|multiply|cuts|reach(es)?|fit"
    r"|beyond|pads|balances?|goe?s?|sees?|comes|gives|no|unexpected)\b"
)
"""Each message has one; "no" and "unexpected" are those of "no such setting" and "unexpected argument"."""


def messages() -> Iterator[tuple[str, str]]:
    """(file and line, text) of each message that stands in the source; {} are the values in it."""
    for file in sorted(LIBRARY.rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
            assigned = [node for node in ast.walk(function) if isinstance(node, ast.Assign)]
            for call in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
                if ast.unparse(call.func) not in ("Problem", "TooFewDevices") or len(call.args) < 2:
                    continue
                message = call.args[1]
                values = [message]
                if isinstance(message, ast.Name):
                    values = [node.value for node in assigned if ast.unparse(node.targets[0]) == message.id]
                for text in (text for value in values for text in texts(value)):
                    yield f"{file.relative_to(LIBRARY)}:{call.lineno}", text


def texts(node: ast.expr) -> list[str]:
    """The texts that an expression may have; none if it is built elsewhere."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    if isinstance(node, ast.JoinedStr):
        return ["".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)]
    if isinstance(node, ast.IfExp):
        return texts(node.body) + texts(node.orelse)
    return []


def fault(text: str) -> str:
    """What keeps the text from being a sentence after "setting: "; "" if nothing does."""
    words = text.replace("{}", " {} ").split()
    if not words:
        return "is empty"
    if words[0].lower() in CONJUNCTIONS:
        return "begins with a conjunction"
    if words[0][0].isupper():
        return "begins with a capital letter"
    if words[0] == "{}" and len(re.findall(r"[a-z_.-]{2,}", text)) <= 2:
        return ""  # a text that is made elsewhere
    if text.rstrip()[-1] in ",;:-." or words[-1].lower() in CONJUNCTIONS:
        return "ends in the middle of a sentence, or with a full stop"
    return "" if VERB.search(text) else "has no verb"


def test_every_message_is_a_sentence_after_the_setting():
    found = list(messages())
    assert len(found) > 300
    faults = [f"{place}: {text!r} {why}" for place, text in found if (why := fault(text))]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    "text",
    [
        "and chosen_groups go together",
        "{} experts a token, of experts={}",
        "{} of a segmented stack",
        "with {} virtual stages, microbatches go in groups",
        "Must be at least 1",
        "is above lr=",
        "must be at least 1, got {}.",
        "",
    ],
)
def test_fragments_are_faults(text):
    assert bool(fault(text)) == (text != "is above lr=")
