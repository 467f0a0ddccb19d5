"""The stored model that a command line names, and its settings; imports neither jax nor flax."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from megajax.command_line.parser import Flag
from megajax.config.class_references import resolve
from megajax.config.compose import TRUST
from megajax.config.config_files import ROOT, Source, assembled, read_stored
from megajax.config.errors import ConfigError, Problem, UserError
from megajax.config.paths_and_store_urls import StoredPath
from megajax.config.read_limits import read_json, settings_of
from megajax.inference.config import GenerationConfig, InferenceConfig
from megajax.inference.request import Pooling
from megajax.inference.sampling_settings import Sampling
from megajax.interop.weights.formats import FILES, Reading, has_files_of, local_name, split_name
from megajax.interop.weights.model_parts import served
from megajax.tokenizers.chat_template import is_missing
from megajax.tokenizers.folder import GENERATION, folder_template, tokenizer_folder

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
SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Settings of generation_config.json that a server takes as its defaults."""


def origin_of(flags: Mapping[str, Any]) -> tuple[str, Reading]:
    """The model by --run, --hf and --adapter, as `open_stored` takes it. Raises ConfigError unless they name one."""
    run, hf, adapter = ((path := flags.get(name)) and path.expanduser() for name in ("run", "hf", "adapter"))
    reading = Reading(adapter=adapter, trusted=flags["trust_code"], ignore=flags["ignore"])
    for flag, path in {"--run": run, "--adapter": adapter}.items():
        if path is not None and split_name(path)[0]:
            hint = "for a Hugging Face model, use --hf=DIR" if flag == "--run" else "give the folder alone"
            raise ConfigError([Problem(flag, f"{path} is FORMAT:DIR, and a folder is wanted", hint)], "command line")
    if run is not None and hf is not None:
        raise ConfigError([Problem("--run", f"is given, and --hf={hf} as well", "name one model")], "command line")
    if run is None and hf is None and adapter is not None:
        if has_files_of(adapter, "peft"):
            hf = resolve("megajax.interop.peft.folder:base_of")(adapter, "set --hf=DIR or --run=RUN")
        elif not (run_folder(adapter) / "config.yaml").is_file():
            message, hint = f"{adapter} has no adapter", "give a PEFT folder, or a run with model.lora"
            raise ConfigError([Problem("--adapter", message, hint)], "command line")
        else:  # checkpoints of a run with adapters contain all weights
            run, reading = adapter, replace(reading, adapter=None)
    if hf is not None:
        return local_name(f"hf:{hf}"), reading
    if run is None:
        raise ConfigError([Problem("--run", "must be given, or --hf=DIR", "name one model")], "command line")
    if reading.ignore:
        message = "names settings of config.json, but no Hugging Face folder is read"
        raise ConfigError([Problem("--ignore", message, "leave it out")], "command line")
    return str(run), reading


def run_folder(path: Path) -> Path:
    """The folder of a run, from this folder, its checkpoints folder, or the folder of a step."""
    # By name: it needs numpy, and front doors are imported without any package.
    checkpoints, _ = resolve("megajax.checkpoint.committed_steps:locate")(path.expanduser())
    return checkpoints.parent if checkpoints.name == "checkpoints" else checkpoints


def run_config(run: Path, root: str | type = ROOT, *, trusted: bool) -> Source:
    """The settings of a run, as recorded with its weights. Raises UserError for a folder without config.yaml.

    trusted: whether it may name code that is not of MegaJAX, and the folder of compiled programs.
    """
    config = run_folder(run) / "config.yaml"
    if not config.is_file():
        problem = f"no {config}\nGive the folder of a run, or of one step in its checkpoints folder."
        if (run / "config.json").is_file():
            problem = f"there is no {config}, but a config.json as of a Hugging Face model: use --hf={run}"
        raise UserError(f"--run={run}: {problem}")
    recorded = resolve("megajax.checkpoint.committed_steps:recorded_config")(run.expanduser())
    source = read_stored(config, root, trusted=trusted, recorded=recorded)
    base = replace(source.base, tokenizer=_tokenizer(source.base.tokenizer, run_folder(run)))
    if not trusted:
        base = replace(base, xla=replace(base.xla, compile_cache_dir=None))
    return replace(source, base=base)


def _tokenizer(config: Any, run: Path) -> Any:
    """The tokenizer config of a run, which reads the run's own copies if the files are gone, as in a run that moved."""
    with suppress(UserError):  # of a store that does not answer
        files = resolve("megajax.tokenizers.tokenizer_files:vocabulary_files")(getattr(config, "base", config))
        if all(path.is_file() for path in files.values()):
            return config
    copies = run / FILES
    return resolve("megajax.tokenizers.tokenizer_files:with_copies")(config, copies, copies)


def generation_config[C: GenerationConfig](name: str | Path, root: type[C], reading: Reading | None = None) -> Source:
    """The settings for text generation from a run or hf:DIR, in a config of class `root`.

    Raises UserError for a model or a tokenizer that can't be read.
    """
    (library, path), reading = split_name(name), reading or Reading()
    if library:
        model, tokenizer = folder_model(path, reading.ignore)
        if not hasattr(model, "schema"):
            kind = type(model).__name__.removesuffix("Config")
            raise UserError(f"--hf={path}: a {kind} alone does not generate text")
        inference = InferenceConfig(compute="bfloat16", template=folder_template(path))
        return Source(str(name), root(model=model, tokenizer=tokenizer, inference=inference))
    source = run_config(path, trusted=reading.trusted)
    cfg, problems = assembled(source, ROOT, {}, trusted=reading.trusted)
    parts = ("model", "tokenizer", "xla")
    relevant = [problem for problem in problems if problem.setting.partition(".")[0] in parts]
    if cfg is None or relevant:
        raise ConfigError(relevant or problems, source.name)
    template = getattr(cfg.data, "template", None)
    if template is None or is_missing(template):
        copies = run_folder(path) / FILES
        template = folder_template(tokenizer_folder(cfg.tokenizer) if template is None else copies) or template
    inference = InferenceConfig(
        compute=cfg.precision.compute, template=template, image_fit=getattr(cfg.data, "fit", "crop")
    )
    config = root(model=served(cfg.model), tokenizer=cfg.tokenizer, inference=inference, xla=cfg.xla)
    return Source(source.name, config)


def folder_model(folder: Path, ignore: Sequence[str] = ()) -> tuple[Any, Any]:
    """The model and the tokenizer of a Hugging Face folder. Raises UserError for one without a model."""
    model = resolve("megajax.interop.huggingface.folder:read_model")(folder, ignore).model
    names = [path.name for path in folder.iterdir()]
    vocabulary = resolve("megajax.models.protocol:ids_below")(model) if hasattr(model, "schema") else None
    return model, resolve("megajax.tokenizers.tokenizer_files:tokenizer_config")(names, folder, vocabulary, folder)


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
    settings = {} if folder is None else settings_of(folder / GENERATION)
    recommended = {name: settings[name] for name in SAMPLING_DEFAULTS if settings.get(name) is not None}
    sampling = Sampling(**recommended)
    for problem in sampling.problems():
        where = f"{folder}/{GENERATION}: {problem.setting} {problem.message}"
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
