"""Settings of data: where rows come from, how they are cut and masked, and how they are read ahead.

Each config says which leaves its rows have (`leaves()`) and builds its row sources:
`cfg.build(tokenizer=, schema=, rows=Rows(...), seed=) -> Splits`; schema: the leaves that the model reads.
"""

from megajax.data.chat.config import ChatConfig, MockPreferencesConfig, PreferencesConfig
from megajax.data.images.config import (
    ClassFoldersConfig,
    ImageShardsConfig,
    ImageTextConfig,
    MaskFoldersConfig,
    MockCaptionsConfig,
    MockImagesConfig,
    MockMasksConfig,
)
from megajax.data.language_benchmarks.config import (
    GlueConfig,
    MockGlueConfig,
    MockRaceConfig,
    MockSquadConfig,
    RaceConfig,
    SquadConfig,
)
from megajax.data.masked.config import (
    LibrarySentencesConfig,
    LibrarySpansConfig,
    MaskedSentencesConfig,
    MaskedSpansConfig,
    PairsConfig,
)
from megajax.data.text.config import BlendConfig, FillInMiddleConfig, MockConfig, StandardLibraryConfig, StreamConfig

DataConfig = (
    BlendConfig
    | ChatConfig
    | ClassFoldersConfig
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
    | MockPreferencesConfig
    | MockRaceConfig
    | MockSquadConfig
    | PairsConfig
    | PreferencesConfig
    | RaceConfig
    | SquadConfig
    | StandardLibraryConfig
    | StreamConfig
)
