"""The layout of a job on the devices that are present: what --elastic makes of it, and what people read of that."""

from collections.abc import Callable, Mapping, Sequence

import jax

from megajax.config.errors import ConfigError
from megajax.mesh.mesh import find_devices, per_process
from megajax.training.replan import FLAG, Replan, elastic_hint, replanned
from megajax.training.run_config import RunConfig


def fitted(
    cfg: RunConfig, devices: Sequence[jax.Device], sources: Mapping[str, str] | None
) -> tuple[Replan, RunConfig, Mapping[str, str] | None]:
    """The layout that fits these devices, the config with it, and who set what. Raises ConfigError for none."""
    plan = replanned(cfg, per_process(devices))
    return plan, plan.cfg, sources and {**sources, **dict.fromkeys(plan.changes, f"--{FLAG}")}


def hinted(error: ConfigError, cfg: RunConfig) -> ConfigError:
    """The error with what --elastic would do, if it is about the devices of this run."""
    return elastic_hint(error, cfg, per_process(find_devices()))


def told(plan: Replan | None, event: Callable[..., None]) -> list[str]:
    """What people read about a layout that had to change, a line each; events.jsonl gets the same."""
    if plan is None or not plan.changes:
        return []
    event("replan", **plan.event())
    return [plan.text(), *plan.notes]
