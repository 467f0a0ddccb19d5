"""The origin of a model for evaluation or text generation, and its settings; imports neither jax nor flax."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from megajax.command_line.parser import Flag
from megajax.config.class_references import resolve
from megajax.config.compose import TRUST
from megajax.config.errors import ConfigError, Problem, UserError
from megajax.config.file_paths import StoredPath
from megajax.config.files import ROOT, Source, assembled, read_stored
from megajax.config.read_limits import read_json, settings_of
from megajax.inference.config import GenerationConfig, InferenceConfig
from megajax.inference.request import Pooling
from megajax.inference.sampling_settings import Sampling
from megajax.interop.formats import local_name, split_name
from megajax.tokenizers.chat_template import is_missing

TRUST_FLAG = Flag(TRUST.removeprefix("--"), help="let configs of runs name classes, files and programs that are not of "
                  "MegaJAX, and run them")  # fmt: skip
"""For verbs that read runs, whose folders may come from strangers."""
IGNORE_FLAG = Flag("ignore", tuple[str, ...], (), help="unknown settings in config.json of hf:DIR that do not matter")
MODEL_FLAGS = (
    Flag(
        "run",
        StoredPath | None,
        help="a run's folder, for its newest checkpoint, or one step in its checkpoints folder",
    ),
    Flag("hf", StoredPath | None, help="a Hugging Face model folder instead of a run"),
    Flag("adapter", Path | None, help="a PEFT folder, or a run with model.lora: its adapter is added to the weights"),
    IGNORE_FLAG,
    TRUST_FLAG,
)
"""The flags that `origin_of` reads."""
TEMPLATES = ("chat_template.jinja", "tokenizer_config.json")
"""Files beside a tokenizer that may contain a chat template; the first one with a template is used."""
GENERATION_CONFIG = "generation_config.json"
SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Settings of generation_config.json that a server takes as its defaults."""
TOKENIZER = "tokenizer"
"""Folder of a run with copies of the files of its tokenizer."""


class Origin(NamedTuple):
    """A run or a Hugging Face folder, and perhaps an adapter."""

    run: Path | None = None
    """A run's folder, its checkpoints folder, or one step in it."""
    hf: Path | None = None
    """A Hugging Face model folder."""
    adapter: Path | None = None
    """A PEFT folder, or a run with `model.lora`."""
    trusted: bool = False
    """Whether the configs of runs may name code that is not of MegaJAX."""
    ignore: tuple[str, ...] = ()
    """Patterns of unknown settings in config.json of `hf` that are accepted."""


def origin_of(flags: Mapping[str, Any]) -> Origin:
    """The origin by --run, --hf and --adapter. Raises ConfigError unless they name one model."""
    run, hf, adapter = (flags[name] and flags[name].expanduser() for name in ("run", "hf", "adapter"))
    trusted = flags["trust_code"]
    if run is not None and hf is not None:
        raise ConfigError([Problem("--run", f"is given, and --hf={hf} as well", "name one model")], "command line")
    if adapter is not None and not (adapter / "adapter_config.json").is_file() and run is None and hf is None:
        return Origin(run=adapter, trusted=trusted)  # checkpoints of a run with adapters contain all weights
    if run is None and hf is None and adapter is not None:
        base = resolve("megajax.interop.peft.folder:base_of")(adapter)
        if base is None or not Path(base).is_dir():
            reason = "names no base model" if base is None else f"is of {base}, and there is no such folder"
            raise UserError(f"--adapter={adapter}: it {reason}: set --hf=DIR or --run=RUN")
        hf = Path(base)
    if run is None and hf is None:
        raise ConfigError([Problem("--run", "must be given, or --hf=DIR", "name one model")], "command line")
    demand_folder(flags["ignore"], hf)
    return Origin(run, hf and _local(hf), adapter, trusted, flags["ignore"])


def _local(hf: Path) -> Path:
    """A Hugging Face folder, or the local copy of one in an object store."""
    return split_name(local_name(f"hf:{hf}"))[1]


def demand_folder(ignore: Sequence[str], folder: Path | None) -> None:
    """Raises ConfigError for settings to ignore without a Hugging Face folder that has settings."""
    if ignore and folder is None:
        message = "names settings of config.json, but no Hugging Face folder is read"
        raise ConfigError([Problem("--ignore", message, "leave it out")], "command line")


def run_folder(path: Path) -> Path:
    """The folder of a run, from this folder, its checkpoints folder, or the folder of a step."""
    # By name: it needs numpy, and front doors are imported without any package.
    checkpoints, _ = resolve("megajax.checkpoint.places:locate")(path.expanduser())
    return checkpoints.parent if checkpoints.name == "checkpoints" else checkpoints


def run_config(run: Path, root: str | type = ROOT, *, trusted: bool) -> Source:
    """The settings of a run. Raises UserError for a folder without config.yaml.

    trusted: whether it may name code that is not of MegaJAX, and the folder of compiled programs.
    """
    config = run_folder(run) / "config.yaml"
    if not config.is_file() and (run / "config.json").is_file():
        raise UserError(
            f"--run={run}: there is no {config}, but a config.json as of a Hugging Face model: use --hf={run}"
        )
    if not config.is_file():
        raise UserError(
            f"--run={run}: no {config}\nGive the folder of a run, or of one step in its checkpoints folder."
        )
    source = read_stored(config, root, trusted=trusted)
    base = replace(source.base, tokenizer=_tokenizer(source.base.tokenizer, run_folder(run)))
    if not trusted:
        base = replace(base, xla=replace(base.xla, compile_cache_dir=None))
    return replace(source, base=base)


def _tokenizer(config: Any, run: Path) -> Any:
    """The tokenizer config of a run, which reads the run's own copies if the files are gone, as in a run that moved."""
    with suppress(UserError):  # of a store that does not answer
        files = resolve("megajax.interop.tokenizer_files:vocabulary_files")(getattr(config, "base", config))
        if all(path.is_file() for path in files.values()):
            return config
    copies = run / TOKENIZER
    return resolve("megajax.interop.tokenizer_files:with_copies")(config, copies, copies)


def generation_config[C: GenerationConfig](origin: Origin, root: type[C]) -> Source:
    """The settings for text generation from an origin, in a config of class `root`.

    Raises UserError for a model or a tokenizer that can't be read.
    """
    if origin.hf is not None:
        return Source(f"hf:{origin.hf}", folder_config(origin.hf, root, origin.ignore))
    if origin.run is None:
        raise ValueError("an origin has a run or a folder")
    source = run_config(origin.run, trusted=origin.trusted)
    cfg, problems = assembled(source, ROOT, {}, trusted=origin.trusted)
    parts = ("model", "tokenizer", "xla")
    relevant = [problem for problem in problems if problem.setting.partition(".")[0] in parts]
    if cfg is None or relevant:
        raise ConfigError(relevant or problems, source.name)
    template = getattr(cfg.data, "template", None)
    if template is None or is_missing(template):
        copies = run_folder(origin.run) / TOKENIZER
        template = folder_template(tokenizer_folder(cfg.tokenizer) if template is None else copies) or template
    config = root(
        model=without_teacher(without_adapters(cfg.model)),
        tokenizer=cfg.tokenizer,
        inference=InferenceConfig(
            compute=cfg.precision.compute, template=template, image_fit=getattr(cfg.data, "fit", "crop")
        ),
        xla=cfg.xla,
    )
    return Source(source.name, config)


def folder_config[C: GenerationConfig](folder: Path, root: type[C], ignore: Sequence[str]) -> C:
    """The settings of a Hugging Face folder. Raises UserError if it is no model, or has unsupported settings."""
    model = resolve("megajax.interop.huggingface.folder:read_model")(folder, ignore).model
    if not hasattr(model, "schema"):
        raise UserError(f"--hf={folder}: a {type(model).__name__.removesuffix('Config')} alone does not generate text")
    names = [path.name for path in folder.iterdir()]
    vocabulary = resolve("megajax.models.protocol:ids_below")(model)
    tokenizer = resolve("megajax.interop.tokenizer_files:tokenizer_config")
    return root(
        model=model,
        tokenizer=tokenizer(names, folder, vocabulary, folder),
        inference=InferenceConfig(compute="bfloat16", template=folder_template(folder)),
    )


def without_adapters(model: Any) -> Any:
    """The config of a model whose adapters are merged into its weights, which are dequantized for that."""
    return model if getattr(model, "lora", None) is None else replace(model, lora=None, quantization=None)


def without_teacher(model: Any) -> Any:
    """The config of the student of a model that was trained beside its teacher; other models as they are."""
    student = getattr(model, "student", None)
    return model if student is None else student()


def tokenizer_folder(tokenizer: Any) -> Path | None:
    """The folder of a tokenizer config's files; None if it has none."""
    path = getattr(tokenizer, "path", None) or getattr(tokenizer, "vocabulary", None)
    if not isinstance(path, str):
        return None
    return Path(path) if Path(path).is_dir() else Path(path).parent


def folder_template(folder: Path | None) -> str | None:
    """The file with a chat template in a tokenizer's folder; None without one."""
    for path in () if folder is None else (folder / name for name in TEMPLATES):
        if path.is_file() and (path.suffix != ".json" or b'"chat_template"' in path.read_bytes()):
            return str(path)
    return None


POOLING = "1_Pooling/config.json"
POOLING_MODES: Mapping[str, Pooling] = {
    "pooling_mode_cls_token": "first",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}
"""The file of sentence-transformers, and its names."""


def folder_sampling(folder: Path | None) -> Sampling:
    """Settings of `SAMPLING_DEFAULTS` that generation_config.json in a model's folder recommends; the others as usual.

    Raises UserError for a value beyond the limits.
    """
    settings = {} if folder is None else settings_of(folder / GENERATION_CONFIG)
    recommended = {name: settings[name] for name in SAMPLING_DEFAULTS if settings.get(name) is not None}
    sampling = Sampling(**recommended)
    for problem in sampling.problems():
        where = f"{folder}/{GENERATION_CONFIG}: {problem.setting} {problem.message}"
        raise UserError(f"{where}: correct the file, or set server.generation_config=false")
    return sampling


def folder_pooling(folder: Path | None) -> Pooling | None:
    """The embeddings of a folder of sentence-transformers, as its file says; None without the file.

    Raises UserError for embeddings of another kind.
    """
    file = folder / POOLING if folder is not None else None
    if file is None or not file.is_file():
        return None
    modes = [name for name, used in read_json(file).items() if name.startswith("pooling_mode_") and used is True]
    if len(modes) != 1 or modes[0] not in POOLING_MODES:
        known = ", ".join(POOLING_MODES)
        raise UserError(
            f"{file}: has {' and '.join(modes) or 'no mode'}; one of {known} is supported: set server.pooling"
        )
    return POOLING_MODES[modes[0]]


def folder_stop_tokens(folder: Path | None) -> frozenset[int]:
    """Ids that end an answer, by the model's files in a tokenizer's folder."""
    return frozenset() if folder is None else resolve("megajax.tokenizers.base:stop_tokens")(folder)
