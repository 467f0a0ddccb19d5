"""`megajax.convert`: every Hugging Face folder of the reference, to a run and back, byte for byte."""

import json
from pathlib import Path

import pytest
from megatron_cases import FOLDER
from safetensors.numpy import load_file

from megajax.interop import conversion

FOLDERS = sorted(path.parent for path in (FOLDER / "hf").glob("*/config.json"))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_run_reproduces_the_folder(folder: Path, tmp_path: Path) -> None:
    def advance(elements: int) -> None:
        del elements

    options = conversion.Options()
    conversion.write(conversion.open_source(f"hf:{folder}"), str(tmp_path / "run"), options, advance)
    conversion.write(conversion.open_source(str(tmp_path / "run")), f"hf:{tmp_path / 'back'}", options, advance)
    given, back = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "back"))
    assert given.keys() == back.keys()
    for name, tensor in given.items():
        assert (tensor.dtype, tensor.shape) == (back[name].dtype, back[name].shape)
        assert tensor.tobytes() == back[name].tobytes()
    configs = [json.loads((path / "config.json").read_text()) for path in (folder, tmp_path / "back")]
    assert configs[0] == configs[1]
