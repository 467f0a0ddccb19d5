"""Errors in a user's own model are reported before anything is compiled, as a UserError that names them."""

import re
from pathlib import Path

import pytest
from user_errors import user_error

from megajax.config import UserError, load
from megajax.job.notebook import prepare, set_up
from tests.docs.blocks import ROOT, blocks


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """The files of docs/own_model.md by name."""
    pages = [block.text for block in blocks(ROOT / "docs/own_model.md")]
    by_name = {text.splitlines()[0].removeprefix("# "): text for text in pages}
    return {name: text for name, text in by_name.items() if name.endswith(".py")}


def refusal(tmp_path: Path, files: dict[str, str], *settings: str) -> str:
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(UserError) as error:
        prepare(load(tmp_path / "my_model.py", "steps=1", "parallel.data=1", *settings))
    return str(error.value)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (
            '(self.patches, self.pixels), ("seq", None)',
            '(self.patches, self.pixels), ("sequence", None)',
            r"image, a leaf .* logical axes \('sequence', None\): unknown logical axis 'sequence'\n(did .*\n)?"
            "choose one of batch, seq, seq_residual",
        ),
        (
            '(cfg.classes, cfg.hidden), (None, "embed")',
            '(cfg.classes, cfg.hidden), ("vocabulary", "embed")',
            r"the weight head has logical axes \('vocabulary', 'embed'\): unknown logical axis 'vocabulary'",
        ),
        (
            "(cfg.patches, cfg.patches), (None, None)",
            '(cfg.patches, cfg.patches), ("patch", None)',
            r"the weight stack.blocks.0.mixer.across has logical axes \('layer', 'patch', None\)",
        ),
        (
            'target: ClassVar[str] = "my_modules.py:Classifier"',
            'target: ClassVar[str] = "my_modules.py:Clasifier"',
            r"ClassifierConfig has target 'my_modules.py:Clasifier', which cannot be loaded\nAttributeError: .*"
            "no attribute 'Clasifier'",
        ),
        (
            'target: ClassVar[str] = "my_modules.py:PatchMixer"',
            'target: ClassVar[str] = "my_module.py:PatchMixer"',
            "PatchMixerConfig has target .*cannot be loaded\nFileNotFoundError: .*my_module.py",
        ),
        (
            'target: ClassVar[str] = "my_modules.py:Classifier"',
            "targets: ClassVar[str]",
            "ClassifierConfig has no target: write target: ",
        ),
        (
            "class PatchMixer(nnx.Module):",
            "class PatchMixer(nnx.Module:",
            "cannot be loaded\nSyntaxError: .*my_modules.py",
        ),
        (
            "import jax.numpy as jnp\n",
            "import nosuchpackage\n",
            r"nosuchpackage.*\n.*my_modules.py, line 3: import nosuch",
        ),
        ("def sections(self)", "def parts(self)", "Classifier lacks sections\ntraining needs it"),
        ('{"": self}', "{}", "Classifier.sections must be a mapping from path to section"),
        ("def loss(self", "def losses(self", "Classifier lacks loss\n"),
        ("def embed(self, batch)", "def embedding(self, batch)", "Classifier lacks embed\n"),
        ("def schema(self)", "def leaves(self)", "ClassifierConfig.*abstract method 'schema'"),
        ("def __len__(self)", "def length(self)", "the train split of StripesConfig.build, a Stripes, lacks __len__"),
        (
            "return mj.Splits(\n            *(",
            "return list(\n            (",
            "StripesConfig.build returned a list, not an mj.Splits",
        ),
    ],
    ids=range(15),
)
def test_the_message_names_the_error(tmp_path, files, old, new, words):
    changed = {name: text.replace(old, new) for name, text in files.items()}
    assert changed != files
    message = refusal(tmp_path, changed)
    assert re.search(words, message), message


def test_a_layer_keeps_the_dtype_of_the_residual_stream(tmp_path, files):
    at = "self.layout.dot("
    assert at in files["my_modules.py"]
    files["my_modules.py"] = files["my_modules.py"].replace(at, "jnp.float32(1) * self.layout.dot(")
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    run = set_up(load(tmp_path / "my_model.py", "steps=1", "parallel.data=1"))
    with user_error():
        next(run.steps(1))
    run.close()


OWN = """

@dataclass(frozen=True)
class WordsConfig(OptaxConfig if {optimizer} else object):
    make: str = "none"

    def problems(self):
        return []

    def build(self, *given):
        return object()


def config"""


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ("tokenizer", "the tokenizer of WordsConfig lacks .*decode, .*vocabulary_size"),
        ("optimizer", "WordsConfig.build returned a object, not a megajax.optim.optimizer.Optimizer"),
    ],
)
def test_a_part_of_the_user_builds_another_object(tmp_path, files, part, words):
    part_code = OWN.format(optimizer=part == "optimizer")
    text = (
        files["my_model.py"].replace("\n\ndef config", part_code).replace("steps=20", f"steps=20, {part}=WordsConfig()")
    )
    files["my_model.py"] = text.replace("import numpy", "from megajax.optim.config import OptaxConfig\nimport numpy")
    message = refusal(tmp_path, files)
    assert re.search(words, message), message


def test_all_rows_of_a_split_need_a_loss_mask(tmp_path, files):
    assert "the model reads no loss_mask" in refusal(tmp_path, files, "evaluation.full=true")
