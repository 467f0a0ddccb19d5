"""Settings of data: where rows come from, how they are cut and masked, and how they are read ahead.

Each config says which leaves its rows have (`leaves()`) and builds its row sources:
`cfg.build(tokenizer=, schema=, rows=Rows(...), seed=) -> Splits`; schema: the leaves that the model reads.
"""

from megajax.data.config.base import CyclicConfig, LoaderConfig, RowsConfig, TokenFilesConfig
from megajax.data.config.benchmarks import (
    BenchmarkConfig,
    GlueConfig,
    MockGlueConfig,
    MockRaceConfig,
    MockSquadConfig,
    RaceConfig,
    SquadConfig,
)
from megajax.data.config.chat import ChatConfig
from megajax.data.config.choices import DataConfig
from megajax.data.config.image_text import DigitCaptionsConfig, ImageTextConfig, ImageTextRowsConfig, MockCaptionsConfig
from megajax.data.config.images import (
    AugmentConfig,
    ClassFoldersConfig,
    ClassImagesConfig,
    CropConfig,
    DigitsConfig,
    ImageShardsConfig,
    MaskFoldersConfig,
    MockImagesConfig,
    MockMasksConfig,
)
from megajax.data.config.library import LibrarySentencesConfig, LibrarySpansConfig, LibraryWordPieceConfig
from megajax.data.config.masked import MaskedConfig, MaskedSentencesConfig, MaskedSpansConfig, PairsConfig
from megajax.data.config.text import BlendConfig, FillInMiddleConfig, MockConfig, StandardLibraryConfig
from megajax.data.splits import Rows, Splits

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
