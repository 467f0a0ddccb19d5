"""All known flags of Megatron-LM, their contradictions, and the conversion of a command line to a run's config."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megajax.config.compose import assemble
from megajax.config.dump import flatten, scalar_text
from megajax.config.errors import Problem
from megajax.config.settings_tree import patch_of
from megajax.interop.megatron.flags.data import data
from megajax.interop.megatron.flags.encoders import (
    bert_embedding,
    bert_stack,
    captions,
    masked_sentences,
    masked_spans,
    partly_frozen,
    t5_embedding,
    t5_stack,
    vlm_embedding,
    vlm_stack,
    vlm_vocabulary,
)
from megajax.interop.megatron.flags.hybrid import decoder_stack
from megajax.interop.megatron.flags.layout import parallel, recompute
from megajax.interop.megatron.flags.model import embedding, stack, vocabulary, width_scaling
from megajax.interop.megatron.flags.reading import (
    Arguments,
    MappedFlag,
    MegatronFlag,
    Noted,
    Refused,
    Unnecessary,
    read_table,
)
from megajax.interop.megatron.flags.run import (
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
from megajax.training.run_config import RunConfig

SHARED = (
    *(vocabulary, width_scaling, recompute, parallel),
    *(batch, optimizer, schedule, precision, evaluation, checkpoint, local_checkpoint, logging, profile, resilience),
)
"""Functions that make settings from flags for every kind of model, in calling order."""
DECODERS = (decoder_stack, embedding, data)
ENCODERS = (bert_stack, bert_embedding, masked_sentences, t5_stack, t5_embedding, masked_spans)
IMAGES = (vlm_stack, vlm_embedding, vlm_vocabulary, captions, partly_frozen)
SCRIPTS = {
    **dict.fromkeys(("pretrain_gpt.py", "pretrain_hybrid.py", "pretrain_mamba.py"), (*DECODERS, *SHARED)),
    "pretrain_bert.py": (*ENCODERS[:3], *SHARED),
    "pretrain_t5.py": (*ENCODERS[3:], *SHARED),
    # The functions of IMAGES replace some of SHARED.
    "pretrain_vlm.py": (*IMAGES, *(part for part in SHARED if part not in (vocabulary, optimizer, width_scaling))),
}
"""Megatron-LM's scripts -> functions that make settings from flags. Flags of unsupported layers are refused."""
TABLE = Path(__file__).with_name("megatron_flags.txt").read_text(encoding="utf-8")
FUNCTIONS = {function.__name__: function for function in (*SHARED, *DECODERS, stack, *ENCODERS, *IMAGES)}
EVERY, *PARTS = re.split(r"(?=^# pretrain_\w+\.py$)", TABLE, flags=re.MULTILINE)
ROWS = tuple(read_table(EVERY, FUNCTIONS))
FLAGS: Mapping[str, MegatronFlag] = {row.name: row for row in ROWS}
"""Name -> row."""
FLAGS_OF: Mapping[str, Mapping[str, MegatronFlag]] = {
    part.partition("\n")[0].removeprefix("# "): {row.name: row for row in read_table(f"\n{part}", FUNCTIONS)}
    for part in PARTS
}
"""Script -> name -> row of a flag with another meaning for it."""

ONE_OF, ONLY_WITH, ABOVE_ZERO = (
    tuple(tuple(line.split()) for line in re.findall(rf"^{title}: (.*)$", TABLE, re.MULTILINE))
    for title in ("one of", "only with", "above zero")
)
"""Groups of mutually exclusive flags; (flag, flags with or without =value, one of which it needs); flags that must be
positive."""

POSITION_KINDS = ("position-embedding-type", "use-rotary-position-embeddings", "multi-latent-attention")
"""--no-position-embedding needs one of these flags."""


@dataclass(frozen=True, slots=True)
class Converted:
    """The result of converting a command line."""

    config: RunConfig | None
    """The run's config; None: the flags have problems."""
    flag_settings: frozenset[str]
    """Settings that the flags determine."""
    mapped: tuple[tuple[str, str], ...]
    """Flag as it was given, and settings with their values."""
    idle: tuple[str, ...]
    """Flags that have no effect given the others."""
    unnecessary: tuple[tuple[str, str], ...]
    """Flag and reason."""
    refused: tuple[tuple[str, str], ...]
    """Flag and reason."""
    remarks: tuple[tuple[str, str], ...]
    """Flag and a note on it."""
    problems: tuple[Problem, ...]
    """Errors that prevent a config."""


def convert(
    argv: Sequence[str], *, script: str = "", devices: int | None = None, table: Mapping[str, MegatronFlag] = FLAGS
) -> Converted:
    """A command line without the program's name -> the config of a run, and the result for each flag.

    script: the script of Megatron-LM, pretrain_gpt.py if it is not in SCRIPTS. devices: their number, if it is known.
    """
    table = {**table, **FLAGS_OF.get(script, {})}
    args = Arguments(table, devices)
    args.parse(argv)
    args.problems += _contradictions(args)
    settings: dict[str, Any] = {}
    for function in SCRIPTS.get(script, SCRIPTS["pretrain_gpt.py"]):
        settings |= function(args)
    settings |= args.single_settings()
    problems, config = list(args.problems), None
    if not problems:
        config, config_problems = assemble(RunConfig, None, patch_of(settings.items()))
        problems = [_with_flags(problem, args) for problem in config_problems]
    return _converted(args, None if problems else config, problems)


def _contradictions(args: Arguments) -> list[Problem]:
    flags, problems = args.flags, []
    for names in ONE_OF:
        # A warm-up of 0 counts as not given.
        exclusive = [name for name in names if flags.get(name) not in (None, 0)]
        if len(exclusive) > 1:
            first, *rest = map(args.flag_text, exclusive)
            problems.append(Problem(first, f"contradicts {' and '.join(rest)}", "give one of them"))
    for name, *companions in ONLY_WITH:
        if flags.get(name) and not any(_is_given(args, companion) for companion in companions):
            needs = " or ".join(f"--{companion.replace('=', ' ')}" for companion in companions)
            problems.append(Problem(args.flag_text(name), f"needs {needs}", "Megatron-LM refuses it otherwise"))
    if flags.get("recompute-activations") and flags.get("recompute-granularity") == "full":
        message = "contradicts --recompute-granularity full: it means selective"
        problems.append(Problem("--recompute-activations", message, "give one of them"))
    for (name,) in ABOVE_ZERO:
        if flags.get(name, 1) < 1:
            problems.append(Problem(f"--{name}", f"must be at least 1, got {flags[name]}"))
    if "no-position-embedding" in flags and not set(POSITION_KINDS) & set(flags):
        message = "does not turn off learned positions, the default, without another flag"
        problems.append(Problem("--no-position-embedding", message, "add --position-embedding-type none, or rope"))
    return problems


def _is_given(args: Arguments, companion: str) -> bool:
    """Whether NAME or NAME=VALUE is among the flags."""
    name, _, value = companion.partition("=")
    actual = args.flags.get(name)
    if name == "recompute-granularity" and args.flags.get("recompute-activations"):
        actual = "selective"
    return actual == value if value else bool(actual)


def _with_flags(problem: Problem, args: Arguments) -> Problem:
    """A problem of the config, with the flags that set the setting."""
    makers = [
        args.flag_text(name)
        for name in args.flags
        if isinstance(fate := args.table[name].fate, MappedFlag)
        and any(_about(problem, setting) for setting in fate.settings)
    ]
    return replace(problem, setting=f"{problem.setting} ({', '.join(makers)})" if makers else problem.setting)


def _about(problem: Problem, setting: str) -> bool:
    """Whether a problem concerns this setting: it is at or below it, or its message gives the setting's value."""
    parent, _, name = setting.rpartition(".")
    match = re.search(rf"(?<![.\w])({re.escape(setting)}|{name}) ?=", problem.message)
    is_named = match is not None and (match[1] == setting or parent == problem.setting.rpartition(".")[0])
    return is_named or _is_below(problem.setting, setting)


def _is_below(setting: str, parent: str) -> bool:
    return f"{setting}.".startswith(f"{parent}.")


def _settings_text(settings: Sequence[str], values: Mapping[str, Any]) -> str:
    """Settings with their values. Settings that are None appear only if all are."""
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
    refused = {problem.setting: (args.flag_text(problem.setting[2:]), problem.message) for problem in args.refusals}
    decided: set[str] = set()
    for name, value in args.flags.items():
        row, text, is_refused = args.table[name], args.flag_text(name), f"--{name}" in refused
        match row.fate:
            case Unnecessary(reason) if not is_refused:
                unnecessary.append((text, reason))
            case Noted(note) if value is not False:
                args.remark(name, note)
            case Refused() if value is False:
                unnecessary.append((text, "off by default"))
            case Refused() if value == row.default:
                unnecessary.append((text, "Megatron-LM's default"))
            case Refused(reason):
                refused[f"--{name}"] = (text, reason)
            case MappedFlag(by=by) if by is not None and name not in args.used:
                idle.append(text)
            case MappedFlag(settings) if not is_refused:
                if values.get(settings[0]) is not None:
                    decided.add(settings[0])
                mapped.append((text, _settings_text(settings, values)))
    return Converted(
        config=config,
        flag_settings=frozenset(decided),
        mapped=tuple(mapped),
        idle=tuple(idle),
        unnecessary=tuple(unnecessary),
        refused=tuple(refused.values()),
        remarks=tuple((problem.setting, problem.message) for problem in args.remarks),
        problems=tuple(problems),
    )
