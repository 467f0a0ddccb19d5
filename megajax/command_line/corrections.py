"""What to write instead of settings under the names of other trainers, and of misspelt ones."""

import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from megajax.command_line.foreign_names import TABLE, Answer, Row, matches, pretrained
from megajax.config import field_types
from megajax.config.compose import assemble
from megajax.config.dump import flatten
from megajax.config.errors import NO_SETTING, Problem
from megajax.config.files import Source, assembled, root_type
from megajax.config.hints import did_you_mean, download_folder, download_hint, likeness
from megajax.config.overrides import Mark, patch_of, plain_name


def corrections(
    arguments: Mapping[str, Any], config: Any = None, flags: Collection[str] = (), *, takes_settings: bool = True
) -> dict[str, Problem]:
    """Name -> what to write instead, for those of the names that are other trainers'.

    arguments: name with underscores -> value; config: of the others, None if there is none; flags: of the verb;
    takes_settings: whether it has a config.
    """
    settings = {} if config is None else flatten(config)
    answered: dict[str, Problem] = {}
    answers: dict[str, Answer] = {}
    written: dict[str, str] = {}
    for name in (name for name in TABLE if name in arguments):
        row, value = TABLE[name], "" if arguments[name] is Mark.BARE else str(arguments[name])
        flag = next((flag for flag in row.flags.split() if flag in flags or ("." in flag and flag in settings)), "")
        if flag:
            answered[name] = _flag(name, flag, row, value)
        elif not takes_settings and row.settings:
            answered[name] = Problem(f"--{name}", f"no such flag; a setting of training is {row.settings}")
        else:
            values, note = row.by(value, settings) if row.by else (_values(row, value, settings), row.note)
            answers[name] = values, note
            written |= values
    problems = [] if config is None else assemble(type(config), config, patch_of(written.items()))[1]
    answered |= {name: _setting(name, *answer, problems, config) for name, answer in answers.items()}
    return {name: answered[name] for name in arguments if name in answered}


def corrected(
    problems: Iterable[Problem], settings: Mapping[str, Any], flags: Collection[str], file: Source, root: str | type
) -> list[Problem]:
    """The problems; of unknown names, with what to write instead: our name for another trainer's, or a similar flag.

    settings: all of the command line, over a config of the file, which may have such names too; flags: of the verb.
    """
    problems, lower = list(problems), file.settings if isinstance(file.settings, Mapping) else {}
    scalars = {plain_name(name): value if isinstance(value, str | int | float) else "" for name, value in lower.items()}
    arguments = {**scalars, **settings}
    known = [*flags, *field_types.names(root_type(root))] if problems else []
    names = [_foreign_name(problem, arguments, known) for problem in problems]
    foreign = {_argument(problem): name for problem, name in zip(problems, names, strict=True) if name}
    config = None
    if foreign:
        lower_patch = {name: value for name, value in lower.items() if plain_name(name) not in foreign}
        patch = patch_of((name, value) for name, value in settings.items() if name not in foreign)
        source = replace(file, settings=lower_patch) if lower else file
        config = assembled(source, root, patch)[0] or assembled(source, root, {})[0]
    answers = corrections({name: arguments[argument] for argument, name in foreign.items()}, config, flags)
    answered = [
        _misspelt(problem, answers[name]) if name else _with_flag(problem, arguments, flags)
        for problem, name in zip(problems, names, strict=True)
    ]
    in_file = {f"--{name}": name for name in scalars if name not in settings}
    return [replace(problem, setting=in_file.get(problem.setting, problem.setting)) for problem in answered]


def similar_name(name: str, known: Iterable[str]) -> str:
    """The name in TABLE that a misspelt one is clearly more similar to than to those known; or ""."""
    best = max(TABLE, key=lambda other: likeness(name, other))
    score = likeness(name, best)
    return best if score >= 0.8 and all(likeness(name, other) < score - 0.05 for other in known) else ""


def _argument(problem: Problem) -> str:
    """The name that was given."""
    return problem.setting if problem.message == NO_SETTING else problem.setting.removesuffix(".type")


def _foreign_name(problem: Problem, arguments: Mapping[str, Any], known: Iterable[str]) -> str:
    """The name in TABLE that causes a problem, or "".

    It is an unknown name, a misspelt one, or one of ours with another trainer's value.
    """
    name = _argument(problem)
    if name not in arguments:
        return ""
    if problem.message == NO_SETTING:
        return name if name in TABLE else similar_name(name, known)
    value = str(arguments[name]).lower() if name != problem.setting and name in TABLE else ""
    is_theirs = value and (value in TABLE[name].words or (TABLE[name].by is pretrained and "/" in value))
    return name if is_theirs else ""


def _misspelt(problem: Problem, answer: Problem) -> Problem:
    """The answer; to a misspelt name, with the name that was probably meant."""
    meant = answer.setting.removeprefix("--")
    if _argument(problem) == meant:
        return answer
    hint = f"did you mean {meant}, which {answer.message}?" + f"\n{answer.hint}" * bool(answer.hint)
    return Problem(f"--{_argument(problem)}", "no such flag or setting", hint)


def _with_flag(problem: Problem, arguments: Mapping[str, Any], flags: Collection[str]) -> Problem:
    """The problem; of an unknown name that is similar to a flag, such as --skip-trian, with that flag."""
    is_name = problem.message == NO_SETTING and problem.setting in arguments and "." not in problem.setting
    hint = did_you_mean(problem.setting, flags).replace("_", "-") if is_name else ""
    return Problem(f"--{problem.setting.replace('_', '-')}", "no such flag or setting", hint) if hint else problem


def _flag(name: str, flag: str, row: Row, value: str) -> Problem:
    """What to write instead of `name` if the verb has a flag for it."""
    target, hint = f"--{flag.replace('_', '-')}", ""
    if row.by is pretrained:
        value = value.removeprefix("pretrained=").partition(",")[0]
        hint, value = download_hint(value), download_folder(value) or value
    text = ("hf:" if flag == "from" and row.by is pretrained else "") + (_value(row, value) or "VALUE")
    hint = f"write {shlex.quote(f'{target}={text}')}" + f"\n{hint}" * bool(hint)
    return Problem(f"--{name}", f"is called {target} here", hint)


def _setting(name: str, values: Mapping[str, str], note: str, problems: Sequence[Problem], config: Any) -> Problem:
    """What to write instead of `name`. problems: of the config with the values of all names."""
    row = TABLE[name]
    problems = [p for p in problems if {p.setting, p.setting.removesuffix(".type")} & values.keys()]
    has_none = any(problem.message == NO_SETTING for problem in problems) or (row.settings and not (values or note))
    if has_none and config is not None:
        return Problem(f"--{name}", f"is called {row.settings}, and this config has no such setting")
    target = " and ".join(values or row.settings.split())
    others = " or ".join(f"--{flag.replace('_', '-')}" for flag in row.flags.split())
    message = f"is no setting here{f'; other verbs have {others}' if others else ''}"
    message = f"is {'set by' if row.by else 'called'} {target} here" if target else message
    words = [shlex.quote(f"--{target}={text or 'VALUE'}") for target, text in values.items() if ".N." not in target]
    mismatches = [problem for problem in problems if problem.message.startswith("expected ")]
    texts = [f"{problem.setting}: {problem.message}" for problem in mismatches]
    lines = [f"write {' '.join(words)}" if words else "", *texts, note]
    return Problem(f"--{name}", message, "\n".join(filter(None, lines)))


def _value(row: Row, value: str) -> str:
    """Our value for theirs. A switch without a value is true."""
    values = row.words
    known = value.lower() or ("true" if "true" in values or "*" in values else "")
    return values.get(known, values.get("*", value))


def _values(row: Row, value: str, settings: Mapping[str, Any]) -> dict[str, str]:
    """Our settings of a row in this config, with the value."""
    names = row.settings.split()
    places = [place for name in names for place in _places(name, settings)] if settings else names
    return dict.fromkeys(places, _value(row, value))


def _places(setting: str, settings: Mapping[str, Any]) -> list[str]:
    """The settings in the blocks of the model, or the setting itself. Heads of states are not attention's."""
    if not setting.startswith("model.stack."):
        return [setting]
    states = ("Mamba", "GatedDelta")
    mixers = {name.removesuffix(".type"): str(kind) for name, kind in settings.items() if name.endswith(".mixer.type")}
    return [
        name
        for name in settings
        if matches(setting, name) and not mixers.get(name.rpartition(".")[0], "").startswith(states)
    ]
