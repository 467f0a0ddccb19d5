"""Durations and limits use the monotonic clock; the wall clock, which may be changed, is only for display."""

import ast

import pytest
from source_tree import dotted, modules

pytestmark = pytest.mark.smoke

WALL = {"time.time", "time.time_ns", "datetime.now", "datetime.datetime.now", "datetime.utcnow", "time.localtime"}
LAST = {name.rpartition(".")[2] for name in WALL}

ALLOWED = {
    "megajax.metrics.event_log": "the time of an event, beside the monotonic clock",
    "megajax.metrics.prometheus_and_opentelemetry": "when the span of an event ends, as collectors want it",
    "megajax.machine.before_run": "compares the clocks of machines",
    "megajax.metrics.console": "the time of day of a line, and when the run will be done",
    "megajax.faults.beats": "the time of a beat: the launcher only looks whether it changes",
    "megajax.faults.pulse": "the same",
    "megajax.faults.signals": "the time of a request to stop, to be shown",
    "megajax.faults.stopping": "the same",
    "megajax.launcher.attempt": "which files of stacks are new, by the clock of the file system",
    "megajax.job.start.compile_cache": "which programs have not been used for weeks, by the clock of the file system",
    "megajax.reporting.write_report": "when a page was written",
    "megajax.machine.examine": "when a machine was examined",
    "megajax.tasks.evaluate_command": "when a task was measured",
    "megajax.tokenizers.chat_template": "the date that templates ask for",
    "megajax.checkpoint.checkpoint_writers": "the commit time that `inspect` shows",
    "megajax.server.openai": "`created` in answers",
    "megajax.server.models": "the same",
}
"""Module -> what it uses the wall clock for."""


def test_users_of_the_wall_clock() -> None:
    asking = {
        module.name
        for module in modules().values()
        for node in module.nodes(ast.Attribute)
        if node.attr in LAST and dotted(node) in WALL
    }
    assert asking <= ALLOWED.keys(), f"use time.monotonic for durations: {sorted(asking - ALLOWED.keys())}"
    unneeded = ALLOWED.keys() - asking
    assert not unneeded, f"listed without need: {sorted(unneeded)}"
