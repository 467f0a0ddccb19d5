"""A small Llama-like model on the text every Python brings along: nothing to download, nothing to prepare.

Run:      python -m megajax.train --config=quickstart.py
Hardware: 2 CPU cores, 0.9 GB of memory
Time:     a minute or two, more if the cores have other work
Expect:   loss from 5.56 to between 1.3 and 1.6 nats per byte, 1.4 to 1.7 on the validation split: Python versions have
          different standard libraries
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
        optimizer=mj.AdamWConfig(beta2=0.95, weight_decay=0.1),
        schedule=mj.ScheduleConfig(lr=3e-3, min_lr=3e-4, warmup_fraction=0.1),
        batch=mj.BatchConfig(global_size=16, micro_size=16),
        evaluation=mj.EvaluationConfig(every=200, batches=4),
        checkpoint=mj.CheckpointConfig(every=200),
        logging=mj.LoggingConfig(prompt="class "),
        steps=600,
        run_dir="runs/quickstart",
    )
