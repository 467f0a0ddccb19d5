"""The config by which a Hugging Face model folder is evaluated."""

from pathlib import Path

from megajax.checkpoint.weights.formats import read_foreign
from megajax.data.config import MockConfig
from megajax.models.protocol import demand_causal
from megajax.tasks.config import EvaluatedConfig
from megajax.tokenizers.config import HuggingFaceTokenizerConfig


def config_of(folder: Path) -> EvaluatedConfig:
    """Its model and its tokenizer.json; the data is made up, and no task reads it but split.

    Raises UserError for a folder that is no model, one with settings that we lack, or no causal language model.
    """
    model = read_foreign(f"hf:{folder.expanduser()}").model
    demand_causal(model, f"--hf={folder}: ")
    return EvaluatedConfig(model=model, data=MockConfig(), tokenizer=HuggingFaceTokenizerConfig(path=str(folder)))
