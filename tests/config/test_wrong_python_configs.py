"""Wrong values in Python configs: all are listed by dotted name, and no check raises."""

import dataclasses
import itertools
import sys
from dataclasses import replace

import pytest

import megajax.command_line.parser as cli
from megajax.config import ConfigError, UserError, field_types, load
from megajax.config.compose import assemble
from megajax.layers.attention.config import AttentionConfig
from megajax.optim.config import MuonConfig
from megajax.training.config import BatchConfig, LinearRampConfig
from megajax.training.run_config import RunConfig

HEAD = """
from dataclasses import replace
import megajax as mj

def good(**changes):
    model = mj.llama3("debug", sequence_length=64, vocabulary_size=257)
    return mj.RunConfig(**({"model": model, "data": mj.MockConfig()} | changes))

"""
LINE = HEAD.count("\n") + 1


@pytest.fixture
def refusal(tmp_path, monkeypatch):
    """The message for a file that ends with `text`, whose first line is LINE."""
    monkeypatch.chdir(tmp_path)

    def of(text):
        (tmp_path / "mine.py").write_text(HEAD + text + "\n")
        with pytest.raises(UserError) as error:
            load("mine.py")
        return str(error.value)

    return of


def test_every_missing_and_unknown_argument_is_listed(refusal):
    text = refusal(
        "def config():\n"
        "    block = mj.BlockConfig(mixer=mj.AttentionConfig(), mlp=mj.MoEConfig(experts=2))\n"
        "    stack = mj.StackConfig(pattern=(block,), repeats=2)\n"
        "    model = mj.DecoderConfig(hidden=64, vocabulary_size=9, stack=stack)\n"
        "    optimizer = mj.AdamWConfig(lr=1)\n"
        "    return mj.RunConfig(model=model, schedule=mj.ScheduleConfig(warmup=3), optimizer=optimizer, steps='x')"
    )
    assert text.startswith("6 problems in mine.py:\n")
    for line in (
        f"mine.py, line {LINE + 5}: ScheduleConfig has no setting warmup",
        f"mine.py, line {LINE + 4}: AdamWConfig has no setting lr\n      there is schedule.lr",
        f"mine.py, line {LINE + 3}: DecoderConfig needs sequence_length\n",
        f"mine.py, line {LINE + 1}: AttentionConfig needs heads",
        "write expert=mj.DenseMLPConfig(ffn=...) or mj.GatedMLPConfig(ffn=...)\n",
        "write data=mj.BlendConfig(...), mj.ChatConfig(...), ",
        " or mj.StreamConfig(paths=...)\n",
    ):
        assert line in text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("def config(): return mj.RunConfig(model=..., steps=10_000)", ["RunConfig needs data"]),
        ("def config(): return good(model=None, batch=None)",
         ["got None\n      write batch=mj.BatchConfig(...)", "model: "]),
        ("def config(): return mj.RunConfig(1, 2)", [f"line {LINE}: RunConfig takes its settings by name, 2 given"]),
        ("def config(): return good(optimizer=mj.AdamWConfig)", ["this is the class: write mj.AdamWConfig(...)"]),
        ("def config(): return good(data=(mj.MockConfig(),))", ["makes it a tuple: remove the comma"]),
        ("def config(): return good(optimizer='adam')", ["did you mean AdamWConfig?"]),
        ("def config(): return good(optimizer=mj.ScheduleConfig())",
         ["optimizer: ScheduleConfig lacks clip, name", "\n      write optimizer=mj.AdamW"]),
        ("def config(): return replace(good(), sedd=3)", ["unexpected keyword argument 'sedd'"]),
        ("def config(): return good(schedule=mj.ScheduleConfig(lr='x', warmup_fraction=2))",
         ["lr: exp", "between 0 and 1"]),
        ("def config(): return good(model=mj.llama3('debug', vocabulary=3))", ["did you mean vocabulary_size?"]),
        ("def config(): return good(model=mj.llama3('50m'))", [f"line {LINE}: llama3 has no size '50m'; sizes: "]),
        ("def config():\n    good().steps = 3", ["dataclasses.replace(config, name=value) makes a changed copy"]),
        ("def config(): return good(parallel=ParallelConfig())",
         ["write mj.ParallelConfig, with import megajax as mj"]),
        ("from megajax import BlndConfig", ["did you mean BlendConfig?"]),
        ("del mj\ndef config(): return mj.RunConfig()", ["import megajax as mj"]),
        ("def config(): return mj.RunConfig(modl=1).modl",
         [f"line {LINE}: RunConfig has no setting modl", "needs data"]),
        ("raise SystemExit(3)", ["the file ends the program (exit code 3)"]),
        ("config = good()",
         ["config is a RunConfig, not a function\n    write def config(): return mj.RunConfig(...)"]),
        ("def config(size): pass", ["TypeError: config() missing 1 required positional argument: 'size'"]),
        ("def config(): good()", ["config() must return a RunConfig, got None\n    end it with return"]),
        ("def config(): return good(),", ["the comma after the closing bracket makes it a tuple"]),
        ("x = '\0'", ["mine.py: source code string cannot contain null bytes"]),
    ],
)  # fmt: skip
def test_what_is_said_of_a_wrong_file(refusal, text, expected):
    message = refusal(text)
    for part in expected:
        assert part in message


def test_a_failing_check_is_reported_only_without_other_problems(refusal):
    text = (
        "from dataclasses import dataclass\n@dataclass(frozen=True, kw_only=True)\nclass Own(mj.RunConfig):\n"
        "    def problems(self, devices=None):\n        return self.nothing\n"
        "def config(): return Own(data=mj.MockConfig(), "
    )
    assert "AttributeError: 'Own' object has no attribute 'nothing'" in refusal(f"{text}model=good().model)")
    assert "cannot be checked" not in refusal(f"{text}model=good().model, steps='x')")


def test_the_command_exits_with_2_and_a_notebook_shows_only_the_message(refusal, monkeypatch, capsys):
    message = refusal("def config(): return good(steps='x')")
    monkeypatch.setattr(sys, "argv", ["train", "--config=mine.py"])
    with pytest.raises(SystemExit) as end:
        cli.front_door(lambda argv: cli.parse(argv, verb="train") and 0)
    assert end.value.code == 2
    assert capsys.readouterr().err == f"\n{message}\n\n"
    with pytest.raises(ConfigError) as error:
        load("mine.py")
    assert error.value.__suppress_context__
    assert len(error.traceback) <= 2
    assert error.value._render_traceback_() == f"ConfigError: {message}".splitlines()


def places(node, rebuild):
    """(name, function from a value to the whole tree with it) for every field below a config."""
    for field in dataclasses.fields(node):
        value = getattr(node, field.name)

        def set_field(new, node=node, name=field.name):
            return rebuild(replace(node, **{name: new}))

        yield f"{type(node).__name__}.{field.name}", set_field
        if field_types.is_config(value):
            yield from places(value, set_field)
        for index, item in enumerate(value if isinstance(value, tuple) else ()):
            if field_types.is_config(item):

                def set_item(new, value=value, index=index, set_field=set_field):
                    return set_field((*value[:index], new, *value[index + 1 :]))

                yield from places(item, set_item)


WRONG = (
    None, "", "text", -1, 0, 1.5, 10**12, 10**40, float("nan"), float("inf"), True, (), {}, {1: None}, (None,), ("a",),
    ..., object(), len, int, AttentionConfig, AttentionConfig(heads=7), b"x", "0:8", 2**31, complex(1, 2), (-1, 2),
)  # fmt: skip


def test_no_value_at_any_place_raises():
    """Each place is tried with the next value."""
    base = load("quickstart.py")
    ramp = BatchConfig(global_size=16, micro_size=2, ramp=LinearRampConfig(start=8, increment=4, samples=100))
    values = itertools.cycle(WRONG)
    failures = {}
    for name, set_value in places(replace(base, optimizer=MuonConfig(), batch=ramp), lambda config: config):
        value = next(values)
        config, problems = assemble(RunConfig, set_value(value), {}, 8)
        assert (config is None) <= bool(problems), name
        if errors := [problem for problem in problems if "cannot be checked" in problem.message]:
            failures[name, repr(value)[:20]] = errors
    assert failures == {}
