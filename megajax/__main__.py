"""The command `megajax`: `megajax VERB ...` is `python -m megajax.VERB ...`, and `megajax` alone lists the verbs.

A verb is a module of one of `FOLDERS` that runs as a program; the start of its docstring describes it. The
modules are parsed, not imported, so the list is quick and needs no other package.
"""

import ast
import re
import runpy
import sys
from collections.abc import Mapping
from pathlib import Path

from megajax import __version__
from megajax.command_line.parser import front_door
from megajax.config.errors import UserError
from megajax.config.hints import did_you_mean
from megajax.config.settings_tree import plain_name

HOME = Path(__file__).parent
FOLDERS = ("", "interop/megatron", "tools")
PROGRAM = '\nif __name__ == "__main__":\n'
"""Text in every module that runs as a program."""
ORDER = ("train", "evaluate", "preprocess", "plan", "launch", "report", "doctor")
"""Verbs listed first."""
OTHER_NAMES = {
    "train": "pretrain finetune fine_tune sft fit dpo grpo",
    "evaluate": "eval lm_eval test benchmark validate",
    "preprocess": "tokenize prepare preprocess_data",
    "generate": "inference infer sample chat complete",
    "convert": "export import quantize merge_adapter",
    "launch": "run torchrun start",
    "plan": "estimate estimate_memory",
    "serve": "server api",
    "doctor": "env check",
    "interop.megatron.args": "megatron_args tools.megatron_args",
}
"""Verb -> what other programs call it."""


def main() -> None:
    """Run the verb of the first argument in this process, like `python -m megajax.VERB`; otherwise list the verbs."""
    name, *rest = sys.argv[1:] or [""]
    verb = plain_name(name)
    if verb not in verbs():
        front_door(_answer)
    folder = str(Path.cwd())
    if folder not in sys.path and "" not in sys.path and not sys.flags.safe_path:
        sys.path.insert(0, folder)  # as `python -m` does: configs may name classes of modules in this folder
    sys.argv[1:] = rest
    runpy.run_module(f"megajax.{verb}", run_name="__main__", alter_sys=True)


def verbs() -> Mapping[str, str]:
    """Verb -> a short description; verbs of megajax/ first, then those of its folders, such as `tools.NAME`."""
    summaries = {}
    for folder in FOLDERS:
        for path in sorted((HOME / folder).glob("*.py")):
            text = path.read_text(encoding="utf-8")
            if path.stem.startswith("_") or PROGRAM not in text or "front_door" not in text:
                continue
            line = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
            summaries[".".join((*folder.split("/"), path.stem)).lstrip(".")] = re.split(r"[:.;](?:\s|$)", line)[0]
    return {name: summaries[name] for name in (*ORDER, *(name for name in summaries if name not in ORDER))}


def _answer(argv: list[str]) -> int:
    """Print the list of verbs or the version.

    Raises:
        UserError: an unknown verb.
    """
    summaries = verbs()
    match argv:
        case [] | ["-h" | "--help" | "help"]:
            print(_listing(summaries))
        case ["--version" | "-V"]:
            print(f"megajax {__version__}")
        case [name, *rest]:
            joined = ".".join(map(plain_name, (name, *rest[:1])))
            names = {plain_name(name), joined}
            other = next((verb for verb, words in OTHER_NAMES.items() if names & {*words.split()}), joined)
            hint = f"did you mean {other}?" if other in summaries else did_you_mean(name, summaries)
            raise UserError(f"megajax: no verb {name}\n    {hint or 'the verbs are ' + ', '.join(summaries)}")
    return 0


def _listing(summaries: Mapping[str, str]) -> str:
    width = max(map(len, summaries))
    lines = ["megajax VERB [--flag=value ...]      the same as python -m megajax.VERB [--flag=value ...]", ""]
    lines += [f"  {name:<{width}}  {text}" for name, text in summaries.items()]
    lines += ["", "megajax VERB --help shows the flags of a verb, megajax --version the version."]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
