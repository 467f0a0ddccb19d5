"""Settings of data: where rows come from, how they are cut and masked, and how they are read ahead.

Each config says which leaves its rows have (`leaves()`) and builds its row sources:
`cfg.build(tokenizer=, schema=, rows=Rows(...), seed=) -> Splits`; schema: the leaves that the model reads.
"""

from megajax.data.benchmarks.config import (
    BenchmarkConfig,
    GlueConfig,
    MockGlueConfig,
    MockRaceConfig,
    MockSquadConfig,
    RaceConfig,
    SquadConfig,
)
from megajax.data.chat.config import ChatConfig
from megajax.data.config import CyclicConfig, LoaderConfig, RowsConfig, TokenFilesConfig
from megajax.data.images.config import (
    AugmentConfig,
    ClassFoldersConfig,
    ClassImagesConfig,
    CropConfig,
    DigitCaptionsConfig,
    DigitsConfig,
    ImageShardsConfig,
    ImageTextConfig,
    ImageTextRowsConfig,
    MaskFoldersConfig,
    MockCaptionsConfig,
    MockImagesConfig,
    MockMasksConfig,
)
from megajax.data.masked.config import (
    LibrarySentencesConfig,
    LibrarySpansConfig,
    LibraryWordPieceConfig,
    MaskedConfig,
    MaskedSentencesConfig,
    MaskedSpansConfig,
    PairsConfig,
)
from megajax.data.rows.splits import Rows, Splits
from megajax.data.text.config import BlendConfig, FillInMiddleConfig, MockConfig, StandardLibraryConfig

__all__ = [
    "AugmentConfig",
    "BenchmarkConfig",
    "BlendConfig",
    "ChatConfig",
    "ClassFoldersConfig",
    "ClassImagesConfig",
    "CropConfig",
    "CyclicConfig",
    "DataConfig",
    "DigitCaptionsConfig",
    "DigitsConfig",
    "FillInMiddleConfig",
    "GlueConfig",
    "ImageShardsConfig",
    "ImageTextConfig",
    "ImageTextRowsConfig",
    "LibrarySentencesConfig",
    "LibrarySpansConfig",
    "LibraryWordPieceConfig",
    "LoaderConfig",
    "MaskFoldersConfig",
    "MaskedConfig",
    "MaskedSentencesConfig",
    "MaskedSpansConfig",
    "MockCaptionsConfig",
    "MockConfig",
    "MockGlueConfig",
    "MockImagesConfig",
    "MockMasksConfig",
    "MockRaceConfig",
    "MockSquadConfig",
    "PairsConfig",
    "RaceConfig",
    "Rows",
    "RowsConfig",
    "Splits",
    "SquadConfig",
    "StandardLibraryConfig",
    "TokenFilesConfig",
]


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
