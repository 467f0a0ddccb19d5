"""The config of a run on your own text: token files in data/, with the tokenizer they were made with."""

from typing import Any

from megajax.checkpoint.config import CheckpointConfig
from megajax.data.config import BlendConfig
from megajax.models.protocol import ModelConfig
from megajax.optim.config import AdamWConfig, ScheduleConfig
from megajax.tokenizers.config import HuggingFaceTokenizerConfig
from megajax.training.config import BatchConfig, EvaluationConfig
from megajax.training.run_config import RunConfig


def own_text(
    name: str, model: ModelConfig, *, schedule: ScheduleConfig, rows: int, steps: int, **changes: Any
) -> RunConfig:
    """`rows` of your own text a step, one row per microbatch; documents do not attend to each other.

    changes: fields to set beside those.
    """
    settings: dict[str, Any] = {
        "data": BlendConfig(paths=("data/corpus_text_document",), split="998,1,1", isolate_documents=True),
        "tokenizer": HuggingFaceTokenizerConfig(path="data/tokenizer.json"),
        "optimizer": AdamWConfig(beta2=0.95, weight_decay=0.1),
        "batch": BatchConfig(global_size=rows, micro_size=1),
        "evaluation": EvaluationConfig(every=1000, batches=4),
        "checkpoint": CheckpointConfig(every=250),
        "run_dir": f"runs/{name}",
    }
    return RunConfig(model=model, schedule=schedule, steps=steps, **settings | changes)
