"""A small Llama-like model on the text every Python brings along: nothing to download, nothing to prepare.

Run:      python -m megajax.train --config=quickstart.py
Hardware: 2 CPU cores, 0.9 GB of memory
Time:     2 to 5 minutes, by what else the cores do
Expect:   loss from 5.56 to between 1.2 and 1.5 nats per byte, 1.4 to 1.6 on the validation split: Python versions have
          different standard libraries
"""

from megajax.checkpoint.config import CheckpointConfig
from megajax.data.configs import StandardLibraryConfig
from megajax.layers.configs import AttentionConfig, BlockConfig, GatedMLPConfig, RMSNormConfig, RopeConfig, StackConfig
from megajax.metrics.config import LoggingConfig
from megajax.models.configs import DecoderConfig
from megajax.optim.config import AdamWConfig, ScheduleConfig
from megajax.precision.config import PrecisionConfig
from megajax.tokenizers.config import ByteTokenizerConfig
from megajax.training.config import BatchConfig, EvaluationConfig
from megajax.training.run_config import RunConfig


def config() -> RunConfig:
    block = BlockConfig(
        mixer=AttentionConfig(heads=4, rope=RopeConfig()),
        mlp=GatedMLPConfig(ffn=384),
        norm=RMSNormConfig(),
    )
    return RunConfig(
        model=DecoderConfig(
            hidden=128,
            vocabulary_size=257,
            sequence_length=128,
            stack=StackConfig(pattern=(block,), repeats=4),
        ),
        data=StandardLibraryConfig(megabytes=8),
        tokenizer=ByteTokenizerConfig(),
        precision=PrecisionConfig(compute="float32"),
        optimizer=AdamWConfig(beta2=0.95, weight_decay=0.1),
        schedule=ScheduleConfig(lr=3e-3, min_lr=3e-4, warmup_fraction=0.1),
        batch=BatchConfig(global_size=16, micro_size=16),
        evaluation=EvaluationConfig(every=200, batches=4),
        checkpoint=CheckpointConfig(every=200),
        logging=LoggingConfig(prompt="def "),
        steps=900,
        run_dir="runs/quickstart",
    )
