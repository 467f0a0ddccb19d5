"""A record of docs/record.md: the quickstart's model with Muon, a larger rate for its embeddings, and fewer steps.

Run:      python -m benchmarks record --settings=benchmarks/results/record_muon.py
Hardware: 2 CPU cores, 0.9 GB of memory
Time:     half a minute for each of three seeds
Expect:   a validation loss of 1.53 nats per byte
"""

import megajax as mj


def config() -> mj.RunConfig:
    return mj.load("quickstart.py").but(
        optimizer=mj.MuonConfig(extra_scale=0.2, beta2=0.95, weight_decay=0.1, embedding_lr=5e-2),
        schedule=mj.ScheduleConfig(lr=8e-3, style="linear", warmup_fraction=0.1),
        evaluation=mj.EvaluationConfig(),
        checkpoint=mj.CheckpointConfig(),
        logging=mj.LoggingConfig(),
        steps=255,
        run_dir="runs/record_muon",
    )
