"""Computes the gradients of the next step on two orders of devices, every n steps."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh

from megajax.config.errors import UserError
from megajax.faults.drills import Drill
from megajax.faults.integrity_config import RecomputeConfig
from megajax.job.integrity.repeated_gradients import AXIS, Recompute, Verdict, scale_of
from megajax.training.guarded.faults import Corruption
from megajax.training.phase_timers import INTEGRITY
from megajax.training.session import Run


class CheckGradients:
    """A hook. Raises Corruption if a device reproducibly computes other gradients than another device."""

    phase = INTEGRITY

    def __init__(
        self,
        cfg: RecomputeConfig,
        run: Run,
        event: Callable[..., None],
        say: Callable[[str], None],
        drills: Sequence[Drill],
    ):
        """Raises UserError for a layout with a single data-parallel group that parallel.elastic did not choose."""
        self.cfg, self._run, self._event, self._say = cfg, run, event, say
        self._drills = [drill for drill in drills if drill.kind == "wrong_gradients"]
        if cfg.every is not None and run.mesh.shape[AXIS] < 2:
            why = "resilience.recompute compares data-parallel groups, and parallel.data is 1"
            if not run.cfg.parallel.elastic:
                raise UserError(f"{why}: set resilience.recompute.every=none, or use more devices for data")
            # A run that resumes on its remaining devices must not end because of a check.
            say(f"{why} on these devices: gradients are not recomputed")
            self.cfg = replace(cfg, every=None)

    @cached_property
    def _recompute(self) -> Recompute:
        return Recompute(self._run.program)

    def due(self, step: int) -> bool:
        # There is no next batch after the last step.
        return self.cfg.every is not None and step % self.cfg.every == 0 and step < self._run.cfg.steps

    def __call__(self, run: Run, step: int) -> None:
        verdict = self.verdict(run, step)
        if verdict is None:
            return
        devices = devices_of(run.mesh, verdict)
        fields = {
            "devices": [device.id for device in devices],
            "processes": sorted({device.process_index for device in devices}),
            "groups": list(verdict.groups),
            "reproducible": verdict.reproducible,
        }
        self._event("recompute_mismatch", step=step, **fields)
        message = mismatch_message(step, verdict, devices)
        if verdict.reproducible:
            raise Corruption(message)
        self._say(message)

    def verdict(self, run: Run, step: int) -> Verdict | None:
        """Compare gradients of the current state on the rows of the next step, which the run reads a second time."""
        loader = run.parts.loader(run.parts.splits.train, int(run.state.consumed_samples), training=True)
        factor = np.float32(run.state.loss_scale)

        def scale(mesh: Mesh, number: int) -> Array:
            return scale_of(mesh, factor, self._faulty(step, number))

        with loader, jax.default_matmul_precision(run.cfg.precision.matmul_precision()):
            with jax.set_mesh(run.mesh):
                batch = next(loader)[0]
            return self._recompute(run.state.inputs, batch, scale, self.cfg.tolerance)

    def _faulty(self, step: int, number: int) -> jax.Device | None:
        """The device that computes wrong gradients in a drill; None: no drill. number: of the computation, from 0."""
        drills = [drill for drill in self._drills if drill.step == step and drill.process == jax.process_index()]
        faulty = any(drill.always or number == 0 for drill in drills)
        return self._run.mesh.local_devices[0] if faulty else None


def devices_of(mesh: Mesh, verdict: Verdict) -> list[jax.Device]:
    """The devices of the suspected groups."""
    return list(np.take(mesh.devices, verdict.groups, mesh.axis_names.index(AXIS)).flat)


def mismatch_message(step: int, verdict: Verdict, devices: Sequence[jax.Device]) -> str:
    """The devices that computed other gradients, and what to do."""
    names = ", ".join(f"{device.id} (process {device.process_index})" for device in devices[:8])
    subject = f"{'devices' if len(devices) > 1 else 'device'} {names}{', ...' * (len(devices) > 8)}"
    if not verdict.reproducible:
        line = (
            f"step {step}: {subject} computed other gradients than another device, but not when run again: a "
            "transient fault in the check; the state is unchanged"
        )
        advice = ". No group repeated its result: if kernels are not deterministic, set resilience.recompute.tolerance"
        return line if verdict.alike else line + advice
    alike = f"; {verdict.alike} other groups agree" if verdict.alike else ""
    return (
        f"step {step}: {subject} reproducibly computed other gradients than another device, from the same weights and "
        f"rows{alike}. Nothing is saved, and steps before this one may be affected. Leave the device out (python -m "
        "megajax.doctor --before-run tests it); the same command goes on from the last checkpoint"
    )
