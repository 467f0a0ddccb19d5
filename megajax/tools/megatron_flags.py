"""Every flag of Megatron-LM that is known here, what contradicts what, and a run's config made of a command line."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megajax.config.dump import flatten, scalar_text
from megajax.config.errors import Problem
from megajax.config.patch import patch_of
from megajax.config.tree import assemble
from megajax.tools.flags import Arguments, Flag, Mapped, Refused, Unnecessary, Word, read_table
from megajax.tools.megatron_data import data
from megajax.tools.megatron_encoders import (
    bert_embedding,
    bert_stack,
    masked_sentences,
    masked_spans,
    t5_embedding,
    t5_stack,
)
from megajax.tools.megatron_hybrid import decoder_stack
from megajax.tools.megatron_layout import parallel
from megajax.tools.megatron_memory import recompute
from megajax.tools.megatron_model import embedding, stack, vocabulary, width_scaling
from megajax.tools.megatron_run import (
    batch,
    checkpoint,
    evaluation,
    local_checkpoint,
    logging,
    optimizer,
    precision,
    profile,
    resilience,
    schedule,
)
from megajax.tools.megatron_vlm import captions, partly_frozen, vlm_embedding, vlm_stack, vlm_vocabulary
from megajax.training.run_config import RunConfig

SHARED = (
    *(vocabulary, width_scaling, recompute, parallel),
    *(batch, optimizer, schedule, precision, evaluation, checkpoint, local_checkpoint, logging, profile, resilience),
)
"""What makes settings of several flags for every kind of model, in the order in which they are called."""
DECODERS = (decoder_stack, embedding, data)
ENCODERS = (bert_stack, bert_embedding, masked_sentences, t5_stack, t5_embedding, masked_spans)
IMAGES = (vlm_stack, vlm_embedding, vlm_vocabulary, captions, partly_frozen)
SCRIPTS = {
    **dict.fromkeys(("pretrain_gpt.py", "pretrain_hybrid.py", "pretrain_mamba.py"), (*DECODERS, *SHARED)),
    "pretrain_bert.py": (*ENCODERS[:3], *SHARED),
    "pretrain_t5.py": (*ENCODERS[3:], *SHARED),
    # Its functions call those they stand for.
    "pretrain_vlm.py": (*IMAGES, *(one for one in SHARED if one not in (vocabulary, optimizer, width_scaling))),
}
"""Megatron-LM's scripts -> what makes settings of flags. Flags of layers that are not here are refused."""
TABLE = Path(__file__).with_name("megatron_flags.txt").read_text(encoding="utf-8")
FUNCTIONS = {function.__name__: function for function in (*SHARED, *DECODERS, stack, *ENCODERS, *IMAGES)}
EVERY, *PARTS = re.split(r"(?=^# pretrain_\w+\.py$)", TABLE, flags=re.MULTILINE)
ROWS = tuple(read_table(EVERY, FUNCTIONS))
FLAGS: Mapping[str, Flag] = {row.name: row for row in ROWS}
"""Name -> row."""
FLAGS_OF: Mapping[str, Mapping[str, Flag]] = {
    part.partition("\n")[0].removeprefix("# "): {row.name: row for row in read_table(f"\n{part}", FUNCTIONS)}
    for part in PARTS
}
"""Script -> name -> row of a flag that says something else to it."""

ONE_OF, ONLY_WITH, ABOVE_ZERO = (
    tuple(tuple(line.split()) for line in re.findall(rf"^{what}: (.*)$", TABLE, re.MULTILINE))
    for what in ("one of", "only with", "above zero")
)
"""Flags of which at most one may be given; (flag, other flag, its value that the first one needs); flags that must not
be 0."""

POSITION_KINDS = ("position-embedding-type", "use-rotary-position-embeddings", "multi-latent-attention")
"""Flags one of which --no-position-embedding wants beside it."""


@dataclass(frozen=True, slots=True)
class Converted:
    """What became of a command line."""

    config: RunConfig | None
    """None where it could not be made."""
    written: frozenset[str]
    """Settings that its flags decide."""
    mapped: tuple[tuple[str, str], ...]
    """Flag as it was given, and settings with their values."""
    idle: tuple[str, ...]
    """Flags that have no effect beside the others."""
    unnecessary: tuple[tuple[str, str], ...]
    """Flag and reason."""
    refused: tuple[tuple[str, str], ...]
    """Flag and reason."""
    remarks: tuple[tuple[str, str], ...]
    """Flag and what to know about it."""
    problems: tuple[Problem, ...]
    """What has to be changed before there is a config."""


def convert(
    words: Sequence[Word], *, script: str = "", devices: int | None = None, table: Mapping[str, Flag] = FLAGS
) -> Converted:
    """A command line without the program's name -> the config of a run, and what became of each flag.

    script: of Megatron-LM; without one of SCRIPTS a decoder's. devices: how many share the work, where that is known.
    """
    table = {**table, **FLAGS_OF.get(script, {})}
    args = Arguments(table, devices)
    args.read(words)
    args.problems += _contradictions(args)
    settings: dict[str, Any] = {}
    for function in SCRIPTS.get(script, SCRIPTS["pretrain_gpt.py"]):
        settings |= function(args)
    settings |= args.single_settings()
    problems, config = list(args.problems), None
    if not problems:
        config, wrong = assemble(RunConfig, None, patch_of(settings.items()))
        problems = [_with_flags(problem, args) for problem in wrong]
    return _converted(args, None if problems else config, problems)


def _contradictions(args: Arguments) -> list[Problem]:
    given, problems = args.flags, []
    for names in ONE_OF:
        # A warm-up of 0 is none.
        together = [name for name in names if given.get(name) not in (None, 0)]
        if len(together) > 1:
            first, *others = map(args.written, together)
            problems.append(Problem(first, f"contradicts {' and '.join(others)}", "give one of them"))
    for name, other, value in ONLY_WITH:
        actual = "selective" if given.get("recompute-activations") else given.get(other)
        if name in given and actual != value:
            says = f"and it is {actual}" if actual else "which is not given"
            problems.append(Problem(args.written(name), f"goes with --{other} {value}, {says}"))
    if given.get("recompute-activations") and given.get("recompute-granularity") == "full":
        what = "contradicts --recompute-granularity full: it stands for selective"
        problems.append(Problem("--recompute-activations", what, "give one of them"))
    for (name,) in ABOVE_ZERO:
        if given.get(name, 1) < 1:
            problems.append(Problem(f"--{name}", f"must be at least 1, got {given[name]}"))
    if "no-position-embedding" in given and not set(POSITION_KINDS) & set(given):
        what = "alone leaves the learned positions that are the default, which it was to turn off"
        problems.append(Problem("--no-position-embedding", what, "add --position-embedding-type none, or rope"))
    return problems


def _with_flags(problem: Problem, args: Arguments) -> Problem:
    """A problem of the config, with the flags that made the setting."""
    makers = [
        args.written(name)
        for name in args.flags
        if isinstance(fate := args.table[name].fate, Mapped) and any(_about(problem, one) for one in fate.settings)
    ]
    return replace(problem, setting=f"{problem.setting} ({', '.join(makers)})" if makers else problem.setting)


def _about(problem: Problem, setting: str) -> bool:
    """Whether a problem is one of this setting, or names it with its value."""
    parent, _, name = setting.rpartition(".")
    named = re.search(rf"(?<![.\w])({re.escape(setting)}|{name}) ?=", problem.message)
    beside = named is not None and (named[1] == setting or parent == problem.setting.rpartition(".")[0])
    return beside or _is_below(problem.setting, setting)


def _is_below(setting: str, other: str) -> bool:
    return f"{setting}.".startswith(f"{other}.")


def _settings_text(settings: Sequence[str], values: Mapping[str, Any]) -> str:
    """Settings with their values, those that are none only where all are."""
    texts, stacks = {}, {".".join(leaf.split(".")[:3]) for leaf in values}
    for setting in settings:
        leaves = {leaf: value for leaf, value in values.items() if _is_below(leaf, setting)}
        if _is_below(setting, "model.stack") and not leaves and "model.stack.segments" in stacks:
            texts["model.stack.segments"] = True
        elif setting == "model.stack.pattern":
            blocks = len({leaf.split(".")[3] for leaf in leaves})
            texts[f"{setting} of {blocks} block{'s' * (blocks > 1)}"] = True
        else:
            texts |= {f"{leaf}={scalar_text(value)}": value is not None for leaf, value in leaves.items()}
    return ", ".join([text for text, has_value in texts.items() if has_value] or texts)


def _converted(args: Arguments, config: RunConfig | None, problems: list[Problem]) -> Converted:
    values = flatten(config) if config is not None else {}
    mapped, idle, unnecessary = [], [], []
    refused = {problem.setting: (args.written(problem.setting[2:]), problem.message) for problem in args.refusals}
    decided: set[str] = set()
    for name, value in args.flags.items():
        row, text, is_refused = args.table[name], args.written(name), f"--{name}" in refused
        match row.fate:
            case Unnecessary(reason) if not is_refused:
                unnecessary.append((text, reason))
            case Refused() if value is False:
                unnecessary.append((text, "it is off anyway"))
            case Refused() if value == row.default:
                unnecessary.append((text, "what Megatron-LM does without it"))
            case Refused(reason):
                refused[f"--{name}"] = (text, reason)
            case Mapped(by=by) if by is not None and name not in args.used:
                idle.append(text)
            case Mapped(settings) if not is_refused:
                if values.get(settings[0]) is not None:
                    decided.add(settings[0])
                mapped.append((text, _settings_text(settings, values)))
    return Converted(
        config=config,
        written=frozenset(decided),
        mapped=tuple(mapped),
        idle=tuple(idle),
        unnecessary=tuple(unnecessary),
        refused=tuple(refused.values()),
        remarks=tuple((problem.setting, problem.message) for problem in args.remarks),
        problems=tuple(problems),
    )
