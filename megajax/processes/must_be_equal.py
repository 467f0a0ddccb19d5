"""What must be equal between the processes of a run, its attempts, copies of its arrays, and models: one table.

Each row has the scope, what is compared, and the message if it differs; other rooms supply the values. `differences`
compares two sets of values, and `Peers.equal` a value of all processes. Does not import jax.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

MAX_NAMED = 8
"""Maximum number of processes that a message names; the rest are counted."""
MAX_DIFFERENCES = 4
"""Maximum number of differences that a message names for a section of an identity; the rest are counted."""


class Equality(NamedTuple):
    """What must be equal."""

    scope: Literal["processes", "attempts", "copies", "models"]
    compared: str
    """What is compared: a hash, or values."""
    message: str
    """Of an error, with names in braces of what is filled in; of a section of an identity, what to do."""
    absent: str = "(none)"
    """Word for a value that one side does not have."""


_SECTION = "SHA-256 of names and values, and the values where they are short (`processes.identity`)"

MUST_BE_EQUAL: Mapping[str, Equality] = {
    "versions": Equality("processes", _SECTION, "install the same versions for all processes", "not installed"),
    "code": Equality("processes", _SECTION, "start all processes from the same files", "absent"),
    "settings": Equality("processes", _SECTION, "give all processes the same config file and command line", "default"),
    "environment": Equality("processes", _SECTION, "set these variables alike for all processes", "not set"),
    "inputs": Equality(
        "processes",
        "SHA-256 of the sizes and of 4 blocks of each file (`data.checksum`)",
        "{processes} other files than process 0. From process 0 to process {first}: {differences}. All processes need "
        "the same data, tokenizer and initial weights",
    ),
    "schedules": Equality(
        "processes",
        "digests of the compiled train step's order",
        "the processes have different schedules of the train step and would wait for each other.\n"
        "Set xla.schedule=default, or start all with the same jax, compiler flags and compile cache.",
    ),
    "facts": Equality(
        "attempts",
        "settings and derived facts as values; SHA-256 of samples of data files, or of all bytes (`data.checksum`)",
        "{run} has step {step} of a run with other {subject} (stored -> requested):\n"
        "{differences}\n{decay}Continue with the old {subject}; {accept}or set another run_dir for a "
        "new run, which with checkpoint.load={run} starts from the state of this one.",
    ),
    "state": Equality(
        "copies",
        "`mesh.array_hash` of each device's part of each array",
        "step {step}: the copies of {array}{more} differ: {holders} {difference}. Nothing is saved. Test the "
        "machine (python -m megajax.doctor --before-run) or leave it out; the same command resumes from the last "
        "checkpoint",
    ),
    "gradients": Equality(
        "copies",
        "`mesh.array_hash` of the gradients of the same rows on other devices, or their norms",
        "step {step}: {devices} reproducibly computed other gradients than another device, from the same weights and "
        "rows{alike}. Nothing is saved, and steps before this one may be affected. Leave the device out (python -m "
        "megajax.doctor --before-run tests it); the same command goes on from the last checkpoint",
    ),
    "reference": Equality(
        "models",
        "`mesh.array_hash` of the weights that the stored log-probabilities were computed with",
        "the run resumes, and the log-probabilities of its reference model (weights {weights}) are not in "
        "{folder}{others}. Put {file} back, set data.reference_dir to its folder, or "
        "start a new run, whose reference are the weights that it starts from.",
    ),
    "tokens": Equality(
        "models",
        "the text of each token",
        "{whose} {source} has another tokenizer: token {token} is {run} in this run, and {theirs} there. Set "
        "tokenizer to that of {source}, and prepare the data with it, or take another model",
    ),
}
IDENTITY = ("versions", "code", "settings", "environment")
"""Rows that a process tells process 0 before jax connects them, in the order of messages."""


class Inequality(NamedTuple):
    """A value that is not equal."""

    name: str
    actual: object
    expected: object


def differences(actual: Mapping[str, Any], expected: Mapping[str, Any], absent: str) -> list[Inequality]:
    """Values that differ: the expected ones in their order, then the others. A value of None is as good as none.

    absent: in place of a value that one side lacks.
    """
    names = [*expected, *(name for name in actual if name not in expected)]
    return [
        Inequality(name, actual.get(name, absent), expected.get(name, absent))
        for name in names
        if actual.get(name) != expected.get(name)
    ]


class IdentitySection(NamedTuple):
    """One part of an identity."""

    digest: str
    """Of all values that must be equal."""
    values: Mapping[str, str] | None
    """Name -> value, for messages; None if they are too long."""


type Identity = Mapping[str, IdentitySection]
"""Row of IDENTITY -> what a process has."""


def difference(actual: Identity, root: Identity) -> str | None:
    """How a process differs from process 0, and what to change; None if it does not. root: that of process 0."""
    texts = []
    for name in IDENTITY:
        section, expected = (identity.get(name, IdentitySection("unknown", None)) for identity in (actual, root))
        if section.digest == expected.digest:
            continue
        pairs = []
        if section.values is not None and expected.values is not None:
            pairs = sorted(differences(section.values, expected.values, MUST_BE_EQUAL[name].absent))
        pairs = pairs or [Inequality("digest", section.digest, expected.digest)]
        entries = [f"{key} {value} (process 0: {root_value})" for key, value, root_value in pairs[:MAX_DIFFERENCES]]
        more = f" and {len(pairs) - len(entries)} more" * (len(pairs) > len(entries))
        texts.append(f"{name}: {', '.join(entries)}{more}; {MUST_BE_EQUAL[name].message}")
    return ". ".join(texts) or None


def name_processes(indices: Iterable[int]) -> str:
    """process 3; processes 1, 2 and 5; processes 1, 2, … 8 and 40 more."""
    numbers = [str(index) for index in sorted(indices)]
    if len(numbers) == 1:
        return f"process {numbers[0]}"
    if len(numbers) > MAX_NAMED:
        return f"processes {', '.join(numbers[:MAX_NAMED])} and {len(numbers) - MAX_NAMED} more"
    return f"processes {', '.join(numbers[:-1])} and {numbers[-1]}"
