"""Names that the last version had. Each is refused with one sentence; the table leaves with the next release."""

from collections.abc import Mapping
from types import MappingProxyType

from megajax.config.overrides import short_type

REMOVED: Mapping[str, str] = MappingProxyType(
    {
        "draft_hf": "was removed: drafts come from earlier text or the model's own heads (inference.drafts)",
        "draft_run": "was removed: drafts come from earlier text or the model's own heads (inference.drafts)",
        "assume": "was removed: bash decides the conditions of a script (--run-script)",
        "ServerConfig.score_template": "was removed: pairs of texts are compared by their vectors (/v1/embeddings)",
        "ServerConfig.score_answers": "was removed: pairs of texts are compared by their vectors (/v1/embeddings)",
        "GatedDeltaNetConfig.kernel": "was removed: plain JAX is the one kernel of delta nets",
        "KimiDeltaConfig.kernel": "was removed: plain JAX is the one kernel of delta nets",
        "adapters": "was removed from plans of a server: they count weights and cache",
        "adapter_rank": "was removed from plans of a server: they count weights and cache",
        "CropConfig": "was removed: AugmentConfig has its settings",
        "DigitCaptionsConfig": "was removed: MockCaptionsConfig needs no files either",
        "DigitsConfig": "was removed: MockImagesConfig needs no files either",
        "AugmentConfig.magnitude": "was removed with RandAugment: augment.colour changes colours",
        "AugmentConfig.operations": "was removed with RandAugment: augment.colour changes colours",
        "ImageTextConfig.packing": "was removed: each line of image-text data is a row",
        "TeacherFilesConfig": "was removed: a teacher runs in the mesh of its student (mj.with_teacher)",
        "with_stored_teacher": "was removed: a teacher runs in the mesh of its student (mj.with_teacher)",
    }
)
"""CLASS.SETTING, flag with underscores, or class -> the rest of the sentence."""


def removed(name: str, owner: type | None = None) -> str:
    """What the table says of a setting of the class `owner`, or of a flag or a class; "" if it says nothing."""
    sentences = {short_type(key): sentence for key, sentence in REMOVED.items()}
    return sentences.get(short_type(name if owner is None else f"{owner.__name__}.{name}"), "")
