"""Low-rank adapters (LoRA) of a small trained Llama on your own text: 8 % of the weights are trained.

The base is the run of quickstart.py, or any other: --checkpoint.load=RUN, or --checkpoint.load=hf:DIR with its model.

Prepare:  python -m megajax.train --config=quickstart.py
          python -m megajax.preprocess --input corpus.jsonl --output-prefix data/corpus --tokenizer=byte --append-eod
Run:      python -m megajax.train --config=lora.py
Hardware: 2 CPU cores, 1 GB of memory
Expect:   docs/tuning.md has the losses on English text
"""

from dataclasses import replace

import megajax as mj


def config() -> mj.RunConfig:
    """Adapters on all matrices of mixers and MLPs."""
    base: mj.RunConfig = mj.load("quickstart.py")
    return base.but(
        model=replace(base.model, lora=mj.LoRAConfig(rank=8, alpha=16.0)),
        data=mj.BlendConfig(paths=("data/corpus_text_document",), split="95,5,0"),
        schedule=mj.ScheduleConfig(lr=2e-3, min_lr=2e-4, warmup_steps=20),
        evaluation=mj.EvaluationConfig(every=100, batches=4),
        checkpoint=mj.CheckpointConfig(load="runs/quickstart", parts="weights", every=100),
        steps=300,
        run_dir="runs/lora",
    )
