"""A job whose copies of a weight differ: it ends with 17, and the due save is not made."""

import pytest
from run_folder import events
from small_jobs import model, run_config

from megajax.config.compose import check
from megajax.config.errors import ConfigError
from megajax.faults.config import HealthConfig, RecomputeConfig, ReplicasConfig, ResilienceConfig, StragglersConfig
from megajax.job.integrity.replicas import HashedLeaf, most_copies
from megajax.job.job import train
from megajax.mesh.config import ParallelConfig
from megajax.mesh.mesh import build_mesh

REPLICATED = ParallelConfig(data=2, data_sharding="replicate")


def test_a_damaged_copy_ends_the_run_before_the_save(tmp_path, capfd):
    resilience = ResilienceConfig(
        replicas=ReplicasConfig(every=100, log_hash=True), inject=("bitflip:step=5:process=0",)
    )
    settings = {"model": model(repeats=1), "parallel": REPLICATED, "resilience": resilience}
    assert train(run_config(tmp_path, **settings)) == 17
    (mismatch,) = events(tmp_path, "replica_mismatch")
    # Every hundred steps, and before every save: at step 3, where all is well, and at step 6.
    assert mismatch["step"] == 6 and mismatch["devices"] == [0, 1] and mismatch["copies"] == 2
    assert [event["step"] for event in events(tmp_path, "state_hash")] == [3]
    assert [event["step"] for event in events(tmp_path, "save_begun")] == [3]
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("0*")) == ["00000003"]
    out = capfd.readouterr().out
    assert "copies compared" in out and "of the" in out
    assert f"step 6: the copies of {mismatch['weight']}" in out and "Nothing is saved." in out


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"replicas": ReplicasConfig(every=0)}, "resilience.replicas.every"),
        ({"replicas": ReplicasConfig(log_hash=True)}, "resilience.replicas.log_hash"),
        ({"recompute": RecomputeConfig(every=-1)}, "resilience.recompute.every"),
        ({"recompute": RecomputeConfig(every=5, tolerance=1.5)}, "resilience.recompute.tolerance"),
        ({"stragglers": StragglersConfig(factor=1.0)}, "resilience.stragglers.factor"),
        ({"stragglers": StragglersConfig(share=0.0)}, "resilience.stragglers.share"),
        ({"health": HealthConfig(every_seconds=0.1)}, "resilience.health.every_seconds"),
        ({"inject": ("bitflip:step=5",)}, "resilience.inject"),
        ({"inject": ("nan:step=5:process=1",)}, "resilience.inject"),
    ],
)
def test_settings_without_effect(settings, name):
    with pytest.raises(ConfigError) as caught:
        check(run_config(resilience=ResilienceConfig(**settings)), 1)
    assert name in str(caught.value)


@pytest.mark.parametrize(("sharding", "copies"), [("replicate", 2), ("zero1", 1)])
def test_copies_of_weights_that_a_bit_flip_needs(sharding, copies):
    mesh = build_mesh(ParallelConfig(data=2))
    whole = HashedLeaf("params.norm", tuple(sharding == "zero1" and axis == "data" for axis in mesh.axis_names), 8)
    counter = HashedLeaf("consumed_samples", (False,) * len(mesh.axis_names), 4)
    assert most_copies([counter, whole], mesh) == copies
