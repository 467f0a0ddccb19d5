"""A small student learns from a larger, frozen teacher with the same vocabulary, in the same mesh.

The teacher is a run of quickstart.py, or any other: `mj.with_teacher` takes two models, and checkpoint.weights loads
the teacher's weights into the part `teacher`.

Prepare:  python -m megajax.train --config=quickstart.py --run_dir=runs/teacher
Run:      python -m megajax.train --config=distill.py
Hardware: 2 CPU cores, 1 GB of memory
Expect:   docs/tuning.md has the losses beside those of a student without a teacher
"""

from pathlib import Path

import megajax as mj


def config() -> mj.RunConfig:
    """The student of quickstart.py: half as wide and half as deep."""
    base: mj.RunConfig = mj.load("distill.py:labels")
    return base.but(
        model=mj.with_teacher(
            base.model, mj.load("quickstart.py").model, mj.DistillationConfig(weight=0.9, label_weight=0.1)
        ),
        checkpoint=mj.CheckpointConfig(weights=(mj.WeightsConfig(run=Path("runs/teacher"), into="teacher"),)),
        run_dir="runs/distilled",
    )


def labels() -> mj.RunConfig:
    """The same student on labels alone."""
    base: mj.RunConfig = mj.load("quickstart.py")
    block = mj.BlockConfig(
        mixer=mj.AttentionConfig(heads=2, rope=mj.RopeConfig()),
        mlp=mj.GatedMLPConfig(ffn=192),
        norm=mj.RMSNormConfig(),
    )
    return base.but(
        model=mj.DecoderConfig(
            hidden=64,
            vocabulary_size=257,
            sequence_length=128,
            stack=mj.StackConfig(pattern=(block,), repeats=2),
        ),
        evaluation=mj.EvaluationConfig(every=100, batches=16),
        steps=300,
        run_dir="runs/labels",
    )
