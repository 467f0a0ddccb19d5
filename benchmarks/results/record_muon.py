"""A record of docs/record.md: the quickstart's model with Muon, a larger rate for its embeddings, and fewer steps.

Run:      python -m benchmarks record --settings=benchmarks/results/record_muon.py
Hardware: 2 CPU cores, 0.9 GB of memory
Time:     half a minute for each of three seeds
Expect:   a validation loss of 1.54 nats per byte
"""

import megajax as mj


def config() -> mj.RunConfig:
    block = mj.BlockConfig(
        mixer=mj.AttentionConfig(heads=4, rope=mj.RopeConfig()),
        mlp=mj.GatedMLPConfig(ffn=384),
        norm=mj.RMSNormConfig(),
    )
    return mj.RunConfig(
        model=mj.DecoderConfig(
            hidden=128,
            vocabulary_size=257,
            sequence_length=128,
            stack=mj.StackConfig(pattern=(block,), repeats=4),
        ),
        data=mj.StandardLibraryConfig(megabytes=8),
        tokenizer=mj.ByteTokenizerConfig(),
        precision=mj.PrecisionConfig(compute="float32"),
        optimizer=mj.MuonConfig(extra_scale=0.2, beta2=0.95, weight_decay=0.1, embedding_lr=5e-2),
        schedule=mj.ScheduleConfig(lr=8e-3, style="linear", warmup_fraction=0.1),
        batch=mj.BatchConfig(global_size=16, micro_size=16),
        steps=255,
        run_dir="runs/record_muon",
    )
