"""The table of lines per family in docs/architecture.md, counted from the files."""

import ast
import re
from importlib import import_module
from pathlib import Path

import pytest

from megajax.config.config_files import SHIPPED

ROOT = Path(__file__).parents[2]
FAMILIES, PRESETS = "megajax.interop.huggingface.families", "megajax.models.presets"
PLACES = {
    "llama4_text": ("llama4", "llama4", "llama4"),
    "kimi_linear": ("hybrids.kimi_linear", "hybrids.linear_attention", "kimi_linear"),
    "falcon_h1": ("hybrids.falcon_h1", "hybrids.mamba_models", "falcon_h1"),
    "lfm2, lfm2_moe": ("hybrids.lfm2", "hybrids.lfm2", "lfm2"),
    "minimax": ("hybrids.minimax", "hybrids.linear_attention", "minimax"),
    "minimax_m2": ("experts.mixtures", "hybrids.linear_attention", "minimax_m2"),
    "qwen3_next": ("qwen3_next", "qwen", "qwen3_next"),
    "qwen3_5_text, qwen3_5_moe_text": ("qwen3_next", "qwen", "qwen3_5"),
    "nemotron_h": ("hybrids.nemotron_h", "hybrids.mamba_models", "nemotron3"),
    "granitemoehybrid": ("hybrids.granite_hybrid", "granite", "granite4"),
    "deepseek_v3": ("deepseek", "deepseek", "deepseek"),
    "glm4_moe": ("experts.mixtures", "glm", "glm4_moe"),
    "glm4": ("relatives", "glm", "glm4"),
    "olmoe": ("experts.mixtures", "windowed", "olmoe"),
    "olmo3": ("relatives", "windowed", "olmo3"),
    "gpt_oss": ("experts.gpt_oss", "windowed", "gpt_oss"),
    "gemma2": ("gemma", "windowed", "gemma"),
    "granite": ("granite", "granite", "granite"),
    "cohere2": ("relatives", "windowed", "cohere2"),
    "exaone4": ("relatives", "windowed", "exaone4"),
    "smollm3": ("relatives", "llama", "smollm3"),
    "phi3": ("llama", "llama", "phi"),
}
"""Families -> modules of the names and of the preset, and the config."""


def lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def source(name: str) -> Path:
    return ROOT / f"{name.replace('.', '/')}.py"


def counts(families: str) -> tuple[int, int, int]:
    """Lines of the three files, each divided by the families, presets or presets in use that it has."""
    names, preset, config = PLACES[families]
    preset_file, config_file = source(f"{PRESETS}.{preset}"), SHIPPED / f"{config}.py"
    functions = [node.name for node in ast.parse(preset_file.read_text()).body if isinstance(node, ast.FunctionDef)]
    public = {name for name in functions if not name.startswith("_")}
    used = public & {*re.findall(r"mj\.(\w+)\(", config_file.read_text())}
    tables = len(import_module(f"{FAMILIES}.{names}").FAMILIES)
    parts = (source(f"{FAMILIES}.{names}"), tables), (preset_file, len(public)), (config_file, len(used))
    return tuple(round(lines(path) / count) for path, count in parts)


@pytest.mark.parametrize("families", PLACES)
def test_the_table_has_the_lines_of_the_files(families: str) -> None:
    parts = counts(families)
    row = f"| `{families}` | {' | '.join(map(str, parts))} | {sum(parts)} |"
    assert row in (ROOT / "docs/architecture.md").read_text()
