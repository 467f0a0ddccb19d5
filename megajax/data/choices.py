"""The data that a config can name besides a class of the user's own."""

from megajax.data.benchmarks.config import (
    GlueConfig,
    MockGlueConfig,
    MockRaceConfig,
    MockSquadConfig,
    RaceConfig,
    SquadConfig,
)
from megajax.data.chat.config import ChatConfig
from megajax.data.images.config import (
    ClassFoldersConfig,
    DigitsConfig,
    ImageShardsConfig,
    MaskFoldersConfig,
    MockImagesConfig,
    MockMasksConfig,
)
from megajax.data.images.image_text_config import DigitCaptionsConfig, ImageTextConfig, MockCaptionsConfig
from megajax.data.masked.config import MaskedSentencesConfig, MaskedSpansConfig, PairsConfig
from megajax.data.text.config import BlendConfig, FillInMiddleConfig, MockConfig, StandardLibraryConfig
from megajax.data.text.library_config import LibrarySentencesConfig, LibrarySpansConfig

DataConfig = (
    BlendConfig
    | ChatConfig
    | ClassFoldersConfig
    | DigitCaptionsConfig
    | DigitsConfig
    | FillInMiddleConfig
    | GlueConfig
    | ImageShardsConfig
    | ImageTextConfig
    | LibrarySentencesConfig
    | LibrarySpansConfig
    | MaskFoldersConfig
    | MaskedSentencesConfig
    | MaskedSpansConfig
    | MockCaptionsConfig
    | MockConfig
    | MockGlueConfig
    | MockImagesConfig
    | MockMasksConfig
    | MockRaceConfig
    | MockSquadConfig
    | PairsConfig
    | RaceConfig
    | SquadConfig
    | StandardLibraryConfig
)
