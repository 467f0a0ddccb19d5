"""Settings, flags and classes that have left, each refused with a sentence. The table leaves with the next release."""

from collections.abc import Mapping
from types import MappingProxyType

from megajax.config.settings_tree import short_type

ROWS = (
    ("draft_hf draft_run", "was removed: drafts come from earlier text or the model's own heads (inference.drafts)"),
    ("assume", "was removed: bash decides the conditions of a script (--run-script)"),
    (
        "ServerConfig.score_template ServerConfig.score_answers",
        "was removed: pairs of texts are compared by their vectors (/v1/embeddings)",
    ),
    (
        "GatedDeltaNetConfig.kernel KimiDeltaConfig.kernel",
        "was removed: plain JAX is the one kernel of delta nets; leave the setting out",
    ),
    ("adapters adapter_rank", "was removed from plans of a server: they count weights and cache"),
    ("CropConfig", "was removed: AugmentConfig has its settings"),
    ("DigitCaptionsConfig", "was removed: MockCaptionsConfig needs no files either"),
    ("DigitsConfig", "was removed: MockImagesConfig needs no files either"),
    ("AugmentConfig.magnitude AugmentConfig.operations", "was removed: augment.colour changes colours"),
    ("ImageTextConfig.packing", "was removed: each line of image-text data is a row"),
    (
        "TeacherFilesConfig TaughtDecoderConfig TopKDistillationConfig TeacherTaskConfig teacher with_stored_teacher",
        "was removed: a teacher runs in the mesh of its student (mj.with_teacher)",
    ),
)
REMOVED: Mapping[str, str] = MappingProxyType({name: text for names, text in ROWS for name in names.split()})
"""CLASS.SETTING, flag with underscores, or class -> the rest of the sentence."""


def removed(name: str, owner: type | None = None) -> str:
    """What the table says of a setting of the class `owner`, or of a flag or a class; "" if it says nothing."""
    sentences = {short_type(key): sentence for key, sentence in REMOVED.items()}
    return sentences.get(short_type(name if owner is None else f"{owner.__name__}.{name}"), "")
