"""Where sentences end."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megajax.data.text.sentences import split_sentences


@pytest.mark.parametrize(
    "sentences",
    [
        ["One ends.", "Two ends!", "Is this three?", "Yes…", "12 is a number."],
        ["Dr. Smith met J. S. Bach at No. 5 in the U.S. Army.", "They talked."],
        ['He said "stop."', '"Why?"', "(Nobody knew.)", "It went on, e.g. here."],
        ["It costs 3.50 or so. and more.", "Versions 1.2 and 3."],
        ["これは文です。", "これも文です！", "終わり"],
        ["No.", "Er kam.", "Überall war es still."],
    ],
)
def test_sentences(sentences):
    gap = "" if sentences[0].startswith("これ") else " "
    assert [text.decode() for text in split_sentences(gap.join(sentences).encode())] == sentences


def test_blank_lines_end_sentences_and_line_ends_do_not():
    text = b" = Title = \n \n First line\nsecond line . Next one.\n\n\nlast"
    expected = [b"= Title =", b"First line\nsecond line .", b"Next one.", b"last"]
    assert list(split_sentences(text)) == expected


def test_no_sentence_without_text():
    assert list(split_sentences(b"")) == list(split_sentences(b" \n\n ")) == []
    assert list(split_sentences(b"a\xff. B\xfe")) == [b"a\xff.", b"B\xfe"]


@given(st.text(st.sampled_from("aB. !?\n。\"'")))
def test_only_space_is_dropped(text):
    joined = b"".join(split_sentences(text.encode())).decode()
    assert "".join(joined.split()) == "".join(text.split())
