"""cuDNN over rows that are cut: triangles, rectangles and squares, with its calls in plain jax."""

import pytest
from cudnn_in_jax import stand_in
from cut_rows import Case, check, documents, texts

from megajax.kernels import cudnn

BIDIRECTIONAL = Case(causal=False, padded=True, segments=texts())
TRIANGLES = ["forward CAUSAL", "forward PADDING", "forward PADDING"]
CASES = {
    "gather": (Case(sink=True, groups=2, context=2), TRIANGLES),
    "gather, MLA": (Case(size=24, wide=16), TRIANGLES),
    "gather, 2 rounds": (Case(rounds=2, context=2), [TRIANGLES[0], *TRIANGLES[1:] * 2]),
    "gather, documents": (
        Case(segments=documents(), sink=True, groups=2),
        ["forward PADDING_CAUSAL", "forward PADDING", "forward PADDING"],
    ),
    "gather, padded": (
        Case(segments=texts([40, 0]), padded=True),
        ["forward PADDING_CAUSAL", "forward PADDING", "forward PADDING"],
    ),
    "gather, both ways": (Case(causal=False), ["forward NO_MASK"]),
    "gather, both ways, padded": (BIDIRECTIONAL, ["forward PADDING"]),
    "ring": (Case(strategy="ring", sink=True, groups=2), ["forward CAUSAL", *["forward NO_MASK"] * 3]),
    "ring, both ways": (Case(strategy="ring", causal=False), ["forward NO_MASK"] * 4),
    "ring, both ways, padded": (
        Case(strategy="ring", causal=False, padded=True, segments=texts()),
        ["forward PADDING"] * 4,
    ),
    "heads, documents, window": (
        Case(strategy="all_to_all", segments=documents(), window=9, groups=2),
        ["forward PADDING_CAUSAL"],
    ),
    "groups": (Case(strategy="ring+all_to_all", groups=2), ["forward CAUSAL", "forward NO_MASK"]),
}
FIRST = ("gather, documents", "ring")


@pytest.mark.parametrize(
    "name", [*FIRST, *(pytest.param(name, marks=pytest.mark.slow) for name in CASES if name not in FIRST)]
)
def test_the_calls_of_cudnn_add_up_to_whole_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, calls = CASES[name]
    called = stand_in(monkeypatch, pallas=False)
    check(case, "cudnn")
    assert called == [*calls, *(each.replace("forward", "backward") for each in calls)]


@pytest.mark.slow
@pytest.mark.parametrize("context", [2, 8])
@pytest.mark.parametrize("strategy", ["all_gather", "ring"])
def test_two_and_eight_devices(strategy: str, context: int, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, pallas=False)
    check(Case(strategy=strategy, context=context, segments=None if strategy == "ring" else documents()), "cudnn")


@pytest.mark.slow
def test_rows_with_too_many_documents_in_a_chunk_or_one_in_two_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have another kernel, and are right."""
    stand_in(monkeypatch)
    monkeypatch.setattr(cudnn, "DOCUMENTS", 2)
    check(Case(segments=documents(), context=2), "cudnn")
    monkeypatch.setattr(cudnn, "DOCUMENTS", 8)
    pieces = documents()
    pieces[0, 40:] = 1
    check(Case(segments=pieces), "cudnn")


@pytest.mark.slow
def test_a_window_in_chunks_is_not_computed_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)
    for strategy in ("all_gather", "ring"):
        with pytest.raises(ValueError, match="chunks have no windows, window=3"):
            check(Case(strategy=strategy, context=2, window=3), "cudnn")
