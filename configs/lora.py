"""Low-rank adapters (LoRA) of a small trained Llama on your own text: 8 % of the weights are trained.

The base is the run of quickstart.py, or any other: --checkpoint.load=RUN, or --checkpoint.load=hf:DIR with its model.

Prepare:  python -m megajax.train --config=quickstart.py
          python -m megajax.preprocess --input corpus.jsonl --output-prefix data/corpus --tokenizer=byte --append-eod
Run:      python -m megajax.train --config=lora.py
Hardware: 2 CPU cores, 1 GB of memory
Expect:   docs/lora.md has the losses on English text
"""

from dataclasses import replace

from megajax.checkpoint.config import CheckpointConfig
from megajax.config import load
from megajax.data.configs import BlendConfig
from megajax.layers.configs import LoRAConfig
from megajax.optim.config import ScheduleConfig
from megajax.training.config import EvaluationConfig
from megajax.training.run_config import RunConfig


def config() -> RunConfig:
    """Adapters on all matrices of mixers and MLPs."""
    base: RunConfig = load("quickstart.py")
    return base.but(
        model=replace(base.model, lora=LoRAConfig(rank=8, alpha=16.0)),
        data=BlendConfig(paths=("data/corpus_text_document",), split="95,5,0"),
        schedule=ScheduleConfig(lr=2e-3, min_lr=2e-4, warmup_steps=20),
        evaluation=EvaluationConfig(every=100, batches=4),
        checkpoint=CheckpointConfig(load="runs/quickstart", parts="weights", every=100),
        steps=300,
        run_dir="runs/lora",
    )
