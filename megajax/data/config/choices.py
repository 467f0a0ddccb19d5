"""The data that a config can name besides a class of the user's own."""

from megajax.data.config.benchmarks import (
    GlueConfig,
    MockGlueConfig,
    MockRaceConfig,
    MockSquadConfig,
    RaceConfig,
    SquadConfig,
)
from megajax.data.config.chat import ChatConfig
from megajax.data.config.image_text import DigitCaptionsConfig, ImageTextConfig, MockCaptionsConfig
from megajax.data.config.images import (
    ClassFoldersConfig,
    DigitsConfig,
    ImageShardsConfig,
    MaskFoldersConfig,
    MockImagesConfig,
    MockMasksConfig,
)
from megajax.data.config.library import LibrarySentencesConfig, LibrarySpansConfig
from megajax.data.config.masked import MaskedSentencesConfig, MaskedSpansConfig, PairsConfig
from megajax.data.config.text import BlendConfig, FillInMiddleConfig, MockConfig, StandardLibraryConfig

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
