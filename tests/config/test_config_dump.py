"""Dumps load back equal; differences and defaults by dotted name."""

from pathlib import Path

from config_samples import (
    AdamWConfig,
    AttentionConfig,
    BlockConfig,
    DataConfig,
    GuardConfig,
    MambaConfig,
    ModelConfig,
    MuonConfig,
    RunConfig,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from user_errors import user_error

from megajax.config import ConfigError
from megajax.config.compose import override
from megajax.config.config_files import load
from megajax.config.dump import diff, diff_from_defaults, flatten, to_yaml

text = st.text(max_size=12) | st.sampled_from(
    ["none", "null", "yes", "1e3", "~", "on", "a: b", "# c", "x\ny", " ", "é\x85"]
)
number = st.floats(allow_nan=False)
whole = st.integers()
blocks = st.builds(BlockConfig, attention=st.builds(AttentionConfig, heads=st.just(1), window=st.none() | whole))
runs = st.builds(
    RunConfig,
    model=st.builds(
        ModelConfig,
        hidden_size=whole,
        pattern=st.lists(blocks | st.builds(MambaConfig, state=whole), max_size=3).map(tuple),
        dtype=st.sampled_from(("bfloat16", "float32")),
    ),
    optimizer=st.builds(AdamWConfig, lr=number, betas=st.tuples(number, number)) | st.builds(MuonConfig, lr=number),
    guard=st.none() | st.builds(GuardConfig, window=whole),
    data=st.builds(
        DataConfig,
        paths=st.lists(text, max_size=3).map(tuple),
        blend=st.dictionaries(text, number, max_size=3),
        parts=st.dictionaries(text, st.builds(GuardConfig), max_size=2),
        limit=st.none() | whole | number | text,
        ramp=st.lists(st.tuples(whole, whole), max_size=2).map(tuple),
        cache=st.none() | st.builds(Path, st.text("abc./~", max_size=6)),
    ),
    run_dir=st.none() | text,
)


@settings(max_examples=30, deadline=None)
@given(run=runs)
def test_yaml_loads_back_equal(run, tmp_path_factory):
    file = tmp_path_factory.getbasetemp() / "round_trip.yaml"
    notes = dict.fromkeys(flatten(run), "# said: by a test")
    for text in (to_yaml(run), to_yaml(run, notes)):
        file.write_text(text, encoding="utf-8")
        back = load(str(file), root=RunConfig)
        assert back == run
        assert diff(back, run) == []
        assert type(back.data.limit) is type(run.data.limit)


RUN = RunConfig(model=ModelConfig(hidden_size=768))


def test_flatten_and_diff():
    changed = override(RUN, "optimizer.type=Muon", "parallel.tensor=2", "guard.window=9", "data.blend=a=0.5")
    assert flatten(RUN)["model.pattern.0.attention.heads"] == 12
    assert flatten(RUN)["optimizer.type"] == "AdamWConfig"
    assert diff(RUN, RUN) == []
    assert diff(RUN, changed) == [
        "parallel.tensor: 1 -> 2",
        "optimizer.type: AdamWConfig -> MuonConfig",
        "optimizer.lr: 0.0003 -> 0.02",
        "optimizer.momentum: (absent) -> 0.95",
        "guard.window: (absent) -> 9",
        "data.blend.a: (absent) -> 0.5",
        "optimizer.betas: [0.9, 0.95] -> (absent)",
        "guard: null -> (absent)",
        "data.blend: {} -> (absent)",
    ]


def test_diff_from_defaults():
    assert diff_from_defaults(RUN) == ["model.hidden_size: (required) -> 768"]
    changed = override(RUN, "optimizer.type=Muon", "steps=7")
    assert diff_from_defaults(changed)[1:] == ["optimizer.type: AdamWConfig -> MuonConfig", "steps: 1000 -> 7"]


def test_a_value_without_a_text_form_is_named():
    with user_error("data.limit", kind=ConfigError):
        flatten(RunConfig(model=ModelConfig(hidden_size=1), data=DataConfig(limit=test_flatten_and_diff)))
