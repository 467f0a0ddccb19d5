"""The faults of a step that end a run."""

from megajax.faults.exit_codes import NUMERIC_FAULT, TRANSIENT_FAULT


class NumericFault(Exception):
    """A step whose loss or gradients are invalid; its update was not applied."""

    code = NUMERIC_FAULT
    """Exit code of the run."""


class UnrepeatedFault(NumericFault):
    """The step failed twice from the same state and rows with different numbers: neither data nor model is the cause.

    Megatron-LM's codes differ. It exits with 16 for a result that repeats on this machine, so that a run on another
    machine tells a broken machine from a bad batch, and then with 17. Here a result that repeats exits with 17: the
    data may be the cause, and a supervisor may restart on the same machine, which would repeat it. A result that does
    not repeat exits with 16: it may not occur after a restart.
    """

    code = TRANSIENT_FAULT


class Corruption(Exception):
    """Devices that should agree hold or compute different values: nothing may be saved. The message is for users."""
