"""From a Hugging Face folder through runs to a folder again: everything that training did not change is kept."""

import json
import re
import shutil
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import gangs
import pytest
from hugging_face_folders import random_weights
from safetensors.numpy import load_file
from user_errors import user_error

from megajax import convert as convert_door
from megajax.checkpoint.config import CheckpointConfig, WeightsConfig
from megajax.config import load
from megajax.config.dump import to_yaml
from megajax.data.chat.config import ChatConfig
from megajax.data.text.config import MockConfig
from megajax.inference.config import GenerationConfig
from megajax.interop.huggingface.family import Settings
from megajax.interop.huggingface.format import config_for, write_model
from megajax.interop.huggingface.registry import families
from megajax.interop.weights.foreign import declared_by
from megajax.interop.weights.formats import open_stored
from megajax.interop.weights.origin import generation_config
from megajax.interop.weights.provenance import Ancestor, Provenance
from megajax.job.job import train
from megajax.job.start.model_files import ModelFiles
from megajax.layers.lora.config import LoRAConfig
from megajax.layers.position.config import RopeConfig, YarnScalingConfig
from megajax.mesh.config import ParallelConfig
from megajax.metrics.config import LoggingConfig
from megajax.optim.config import AdamWConfig, ScheduleConfig
from megajax.tokenizers.chat_template import TEMPLATES
from megajax.tokenizers.config import (
    ByteTokenizerConfig,
    HuggingFaceTokenizerConfig,
    MultimodalTokenizerConfig,
    NullTokenizerConfig,
    SentencePieceTokenizerConfig,
    WordPieceTokenizerConfig,
)
from megajax.tokenizers.tokenizer_files import NAMES, tokenizer_config, with_copies
from megajax.training.config import BatchConfig, EvaluationConfig
from megajax.training.run_config import RunConfig

IDS = {"bos_token_id": 1, "eos_token_id": [4, 5], "pad_token_id": 0}
DECODER = {
    **{"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "vocab_size": 300, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6},
    **{"hidden_act": "silu", "tie_word_embeddings": False, "initializer_range": 0.02, "use_cache": True, **IDS},
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {
        **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", **DECODER},
        **{"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}, "head_dim": 4},
        **{"attention_bias": False, "mlp_bias": False, "pretraining_tp": 1, "transformers_version": "5.23.0"},
    },
    "gpt2": {
        **{"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "torch_dtype": "bfloat16", "n_embd": 16},
        **{"n_layer": 2, "n_head": 4, "n_positions": 32, "n_ctx": 32, "vocab_size": 300, "n_inner": None, **IDS},
        **{"activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "resid_pdrop": 0.1, "embd_pdrop": 0.1},
    },
}
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"


def write_tokenizer(folder: Path, size: int = 262) -> None:
    """A byte-level tokenizer whose first ids are special, with a chat template and settings of generation."""
    tokenizers = pytest.importorskip("tokenizers")
    names = ["<pad>", "<s>", "<unk>", "<|im_start|>", "<|im_end|>", "</s>"]
    engine = tokenizers.Tokenizer(tokenizers.models.BPE())
    engine.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=size, special_tokens=names, initial_alphabet=alphabet)
    engine.train_from_iterator(["the cat sat on the mat " * 9], trainer)
    engine.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"pad_token": "<pad>"}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "generation_config.json").write_text(json.dumps({**IDS, "do_sample": True, "temperature": 0.6}))


def write_folder(folder: Path) -> Path:
    """A folder of a family in bfloat16."""
    config, family = MODELS["llama"], families()["llama"]
    model = family.read(Settings(dict(config)))
    folder.mkdir(parents=True)
    origin = Provenance(settings=config, dtype="bfloat16")
    write_model(folder, model, random_weights(declared_by(model), scale=0.1), family, origin)
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("theirs") / "llama")


def convert(*arguments: str) -> None:
    assert convert_door.main([*arguments]) == 0


def one_step(cfg: RunConfig, folder: Path, **changes: Any) -> Path:
    """Trains for a step on rows of 16 tokens, into a folder."""
    settings: dict[str, Any] = {
        "model": replace(cfg.model, sequence_length=16),
        "data": MockConfig(documents=300),
        "schedule": ScheduleConfig(lr=1e-2),
        "parallel": ParallelConfig(data=1),
        "batch": BatchConfig(global_size=2, micro_size=2),
        "evaluation": EvaluationConfig(every=None, batches=0),
        "logging": LoggingConfig(every=1, plot=False, sample=False, live="never", report=False),
        "steps": 1,
        "run_dir": str(folder),
    }
    assert train(cfg.but(**settings | changes)) == 0
    return folder


def fresh(model: Any, **changes: Any) -> RunConfig:
    """A config with the default tokenizer."""
    return RunConfig(model=model, data=MockConfig(), **changes)


def files_of(folder: Path) -> dict[str, Any]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name in NAMES}


def demand_same(folder: Path, source: Path) -> None:
    """All files beside the weights, config.json, and the names, shapes and dtypes of tensors."""
    assert files_of(folder) == files_of(source) and len(files_of(source)) == 4
    assert settings_of(folder) == settings_of(source)
    tensors, others = (load_file(path / "model.safetensors") for path in (folder, source))
    assert {name: (a.dtype, a.shape) for name, a in tensors.items()} == {
        name: (a.dtype, a.shape) for name, a in others.items()
    }
    assert any((tensors[name] != others[name]).any() for name in tensors), "the run has trained"


def settings_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


@pytest.fixture(scope="module")
def back(llama, tmp_path_factory) -> tuple[Path, str]:
    """The export of a run of one step, and the output of convert."""
    return chain(llama, tmp_path_factory.mktemp("chain"))


def chain(source: Path, folder: Path) -> tuple[Path, str]:
    """Folder, run, one step, folder again."""
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as output:
        patch.setattr(convert_door, "use_devices", lambda devices: None)
        patch.setattr(convert_door.signal, "signal", lambda number, handler: None)
        convert(f"--from=hf:{source}", f"--to={folder / 'run'}")
        cfg = load(folder / "run/config.yaml")
        tuned = one_step(cfg, folder / "tuned")
        convert(f"--from={tuned}", f"--to=hf:{folder / 'back'}", "--verify")
    return folder / "back", output.getvalue()


def test_one_step_loses_nothing_of_a_folder(llama, back) -> None:
    folder, output = back
    demand_same(folder, llama)
    assert "config.json: that of the source\n" in output and "tokenizer: tokenizer.json, " in output


@pytest.mark.slow
def test_runs_of_runs_with_adapters_and_means_lose_nothing(llama, tmp_path) -> None:
    """hf: directly, with the default tokenizer; adapters; another run from the merged weights; a mean of two."""
    model = load_config_of(llama)
    lora = replace(model, lora=LoRAConfig(rank=2, alpha=4.0))
    adapted = one_step(
        fresh(lora, checkpoint=CheckpointConfig(load=Path(f"hf:{llama}"))),
        tmp_path / "adapted",
        model=replace(lora, sequence_length=16),
        optimizer=AdamWConfig(trainable=("*.lora_a", "*.lora_b")),
    )
    convert(f"--from={adapted}", "--merge", f"--to={tmp_path / 'merged'}")
    weights = CheckpointConfig(weights=(WeightsConfig(run=tmp_path / "merged"),))
    second = one_step(fresh(model, checkpoint=weights), tmp_path / "second")
    state = CheckpointConfig(load=second)
    third = one_step(fresh(model, checkpoint=state), tmp_path / "third", steps=2)
    convert(f"--average={second}/1,{third}/2", f"--to={tmp_path / 'mean'}")
    for number, run in enumerate((tmp_path / "merged", third, tmp_path / "mean")):
        convert(f"--from={run}", f"--to=hf:{tmp_path / f'back{number}'}")
        demand_same(tmp_path / f"back{number}", llama)
    convert(f"--from={adapted}", "--merge", f"--to=hf:{tmp_path / 'back'}")
    demand_same(tmp_path / "back", llama)
    origin = open_stored(third).origin
    assert origin == open_stored(second).origin and origin.dtype == "bfloat16"


def test_named_templates_and_templates_of_processors_are_carried(llama, tmp_path) -> None:
    source, named = tmp_path / "theirs", "additional_chat_templates/tool_use.jinja"
    shutil.copytree(llama, source)
    (source / named).parent.mkdir()
    (source / named).write_text("tools")
    (source / "chat_template.json").write_text('{"chat_template": "of a processor"}')
    exported, _ = chain(source, tmp_path)
    assert (exported / named).read_text() == "tools"
    assert "processor" in (exported / "chat_template.json").read_text()

    cfg = load(tmp_path / "tuned/config.yaml")
    chats = ChatConfig(train_paths=("-",), template="{{ messages[0].content }}")
    ancestor = Ancestor.of({"facts": {"model.vocabulary_size": 300}}, tmp_path / "tuned/checkpoints")
    ModelFiles(replace(cfg, data=chats), cfg.tokenizer.build(), ancestor).write(tmp_path / "other")
    files = {path.name for path in (tmp_path / "other/tokenizer").iterdir()}
    assert "chat_template.jinja" in files and "chat_template.json" not in files, "the older one would go first"

    settings, templates = (
        tmp_path / "tuned/tokenizer/tokenizer_config.json",
        {"default": "{{ 1 }}", "tool_use": "{{ 2 }}"},
    )
    (settings.parent / "chat_template.jinja").unlink()
    lines = [{"name": name, "template": text} for name, text in templates.items()]
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "chat_template": lines}))
    chats = replace(chats, template=str(settings))
    ModelFiles(replace(cfg, data=chats), cfg.tokenizer.build(), ancestor).write(tmp_path / "own")
    assert not (tmp_path / "own/tokenizer/chat_template.jinja").exists(), "it would replace that for tools"


def test_a_moved_run_reads_its_own_copies(llama, back, tmp_path) -> None:
    """The source of its tokenizer and its template is gone."""
    run, copies = tmp_path / "moved", tmp_path / "moved/tokenizer"
    run.mkdir()
    shutil.copytree(back[0].parent / "tuned/tokenizer", copies)
    cfg = load(back[0].parent / "tuned/config.yaml")
    tokenizer, gone = cfg.tokenizer, str(tmp_path / "gone/tokenizer.json")
    chats = ChatConfig(train_paths=("-",), template=str(tmp_path / "gone/chat_template.jinja"))
    (run / "config.yaml").write_text(to_yaml(replace(cfg, tokenizer=replace(tokenizer, path=gone), data=chats)))
    config = generation_config(run, GenerationConfig).base
    assert config is not None and config.tokenizer == replace(tokenizer, path=str(copies / "tokenizer.json"))
    assert config.inference.template == str(copies / "chat_template.jinja")

    (copies / "spiece.model").touch()
    pieces = SentencePieceTokenizerConfig(path="gone.model")
    image = MultimodalTokenizerConfig(base=pieces)
    assert with_copies(image, copies, Path("new")).base == SentencePieceTokenizerConfig(path="new/spiece.model")
    words = WordPieceTokenizerConfig(vocabulary="gone.txt")
    assert with_copies(words, copies, Path("new")) == words, "there is no copy"


def load_config_of(folder: Path) -> Any:
    return families()["llama"].read(Settings(settings_of(folder)))


def write_chats(folder: Path) -> Path:
    chats = folder / "chats.jsonl"
    line = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "the cat"}]}
    chats.write_text((json.dumps(line) + "\n") * 40)
    return chats


def test_a_chat_model_is_tuned_on_its_own_template(llama, tmp_path, capsys) -> None:
    convert(f"--from=hf:{llama}", f"--to={tmp_path / 'base'}")
    cfg = load(tmp_path / "base/config.yaml")
    data = ChatConfig(train_paths=(str(write_chats(tmp_path)),), cache_dir=str(tmp_path / "cache"))
    run = one_step(cfg, tmp_path / "run", model=replace(cfg.model, sequence_length=32), data=data)
    out = capsys.readouterr().out
    assert re.search("chat template +the tokenizer's own", out) and "warning: data.template" not in out
    assert "chat_template.jinja of data.template" not in out
    convert(f"--from={run}", f"--to=hf:{run}-export")
    assert Path(f"{run}-export/chat_template.jinja").read_text() == (llama / "chat_template.jinja").read_text()


def test_changes_of_a_run_are_in_its_export(llama, tmp_path, capsys) -> None:
    """Longer rows by another scaling of rotary positions, more tokens with their tokenizer, and a chat template."""
    model = load_config_of(llama)
    block = model.stack.pattern[0]
    rope = RopeConfig(base=block.mixer.rope.base, scaling=YarnScalingConfig(factor=2.0, original=4096))
    blocks = (replace(block, mixer=replace(block.mixer, rope=rope)),)
    stack = replace(model.stack, pattern=blocks)
    tokenizer = tmp_path / "tokens"
    tokenizer.mkdir()
    write_tokenizer(tokenizer, size=272)
    chats = write_chats(tmp_path)
    weights = WeightsConfig(run=Path(f"hf:{llama}"), new_tokens="mean", changed=("*.rope.*",))
    larger = replace(model, stack=stack, vocabulary_size=304, sequence_length=32)
    cfg = fresh(
        larger,
        tokenizer=HuggingFaceTokenizerConfig(path=str(tokenizer / "tokenizer.json"), eod="<|im_end|>"),
        checkpoint=CheckpointConfig(weights=(weights,)),
    )
    data = ChatConfig(train_paths=(str(chats),), template="chatml", cache_dir=str(tmp_path / "cache"))
    run = one_step(cfg, tmp_path / "run", model=larger, data=data)
    out = capsys.readouterr().out
    assert "for exports: generation_config.json of " in out and "chat_template.jinja of data.template" in out
    assert "warning: data.template, chatml, is not the tokenizer's own" in out
    convert(f"--from={run}", f"--to=hf:{tmp_path / 'back'}")
    assert "config.json: that of the source, but " in capsys.readouterr().out
    expected = settings_of(llama) | {"vocab_size": 304, "eos_token_id": 4}
    settings = settings_of(tmp_path / "back")
    scaling = settings.pop("rope_parameters")
    expected.pop("rope_parameters")
    assert settings == expected
    assert (scaling["rope_type"], scaling["factor"], scaling["rope_theta"]) == ("yarn", 2.0, 10000.0)
    files = files_of(tmp_path / "back")
    assert files["tokenizer.json"] == (tokenizer / "tokenizer.json").read_bytes()
    assert json.loads(files["tokenizer_config.json"])["eos_token"] == "<|im_end|>"
    generation = json.loads(files["generation_config.json"])
    assert generation == {**IDS, "eos_token_id": 4, "do_sample": True, "temperature": 0.6}
    assert files["chat_template.jinja"] == TEMPLATES["chatml"].encode()


def test_another_end_token_is_the_only_change_of_a_run_that_sets_it(llama, tmp_path) -> None:
    """Fine-tuning for chats ends answers with another token than the base model."""
    tokenizer = HuggingFaceTokenizerConfig(path=str(llama / "tokenizer.json"), eod="<|im_start|>")
    provenance = Provenance(format="hf", settings=MODELS["llama"])
    ancestor = Ancestor(provenance, llama, 300)
    files = ModelFiles(fresh(load_config_of(llama), tokenizer=tokenizer), tokenizer.build(), ancestor)
    assert not files.differs and files.provenance == replace(provenance, special_tokens={"eos_token_id": 3})
    assert files.write(tmp_path).startswith("for exports: tokenizer.json, ")
    written, source = files_of(tmp_path / "tokenizer"), files_of(llama)
    ends = {"tokenizer_config.json": {"eos_token": "<|im_start|>"}, "generation_config.json": {"eos_token_id": 3}}
    for name, end in ends.items():
        assert json.loads(written.pop(name)) == json.loads(source.pop(name)) | end
    assert written == source and len(source) == 2
    same = replace(tokenizer, eod="<|im_end|>")  # One of the source's end tokens.
    assert replace(files, cfg=fresh(load_config_of(llama), tokenizer=same), tokenizer=same.build()).special_tokens == {}


def test_tokenizers_without_files_count_as_a_choice_only_with_another_vocabulary(llama, tmp_path) -> None:
    model, byte, null = load_config_of(llama), ByteTokenizerConfig(), NullTokenizerConfig(vocabulary_size=300)
    of_folder = Ancestor(Provenance(format="hf", settings=MODELS["llama"]), llama, 300)
    no_files = tmp_path / "none"
    cases = [
        (byte, of_folder, False),
        (null, of_folder, False),
        (byte, of_folder._replace(vocabulary=260), True),
        (byte, of_folder._replace(files=no_files), False),
        (byte, Ancestor(Provenance(format="megatron"), no_files, 300), True),
        (null, Ancestor(Provenance(format="megatron"), no_files, 300), False),
        (byte, None, True),
        (null, None, False),
    ]
    for tokenizer, ancestor, expected in cases:
        files = ModelFiles(fresh(model, tokenizer=tokenizer), tokenizer.build(), ancestor)
        assert files.differs == expected, (tokenizer, ancestor)
        assert bool(files.provenance.special_tokens) == expected


def test_the_length_is_the_maximum_of_source_and_rows() -> None:
    recorded, family = MODELS["llama"], families()["llama"]
    model = family.read(Settings(dict(recorded)))
    for length, expected in ((16, 4096), (8192, 8192)):
        settings = config_for(replace(model, sequence_length=length), family, recorded, [])
        assert settings == recorded | {"max_position_embeddings": expected}
    recorded, family = MODELS["gpt2"], families()["gpt2"]
    model = replace(family.read(Settings(dict(recorded))), sequence_length=16)
    assert config_for(model, family, recorded, []) == recorded | {"n_positions": 16}  # its table has 16 rows


def test_only_changes_are_written_and_in_the_spelling_of_the_source() -> None:
    recorded, family = MODELS["llama"], families()["llama"]
    settings = recorded | {"vocab_size": 320}
    model = family.read(Settings(dict(settings)))
    assert config_for(model, family, recorded, []) == settings
    block = model.stack.pattern[0]
    other = replace(block, mixer=replace(block.mixer, rope=RopeConfig(base=5e5)))
    model = replace(model, stack=replace(model.stack, pattern=(other,)))
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    assert config_for(model, family, recorded, []) == settings | rope
    older = {name: value for name, value in recorded.items() if name != "rope_parameters"} | {"rope_theta": 1e4}
    assert config_for(model, family, older, []) == older | {"vocab_size": 320, "rope_theta": 5e5, "rope_scaling": None}
    special = {"bos_token_id": None, "eos_token_id": 256, "pad_token_id": None}
    source = family.read(Settings(dict(recorded)))
    assert config_for(source, family, recorded, [], special) == recorded | special
    as_qwen2 = config_for(family.read(Settings(dict(recorded))), families()["mistral"], recorded, [])
    assert as_qwen2["eos_token_id"] == [4, 5] and as_qwen2["model_type"] == "mistral"


def test_a_run_of_bytes_has_a_tokenizer_that_other_libraries_read(llama, tmp_path) -> None:
    pytest.importorskip("tokenizers")
    model = replace(load_config_of(llama), vocabulary_size=257)
    run = one_step(fresh(model), tmp_path / "run")
    convert(f"--from={run}", f"--to=hf:{tmp_path / 'back'}")
    settings, folder = settings_of(tmp_path / "back"), tmp_path / "back"
    ids = [settings[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")]
    assert ids == [None, 256, None] and settings["torch_dtype"] == "float32"
    config = tokenizer_config([*files_of(folder)], folder, 257, folder)
    text = "def f():\n\treturn '日本 <|endoftext|>'  # é\r\n"
    tokenizer = config.build()
    assert tokenizer.encode(text).tolist() == [*text.encode()] and tokenizer.eod == 256
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.slow
def test_two_processes_carry_the_same_record_and_write_once(llama, tmp_path) -> None:
    convert(f"--from=hf:{llama}", f"--to={tmp_path / 'run'}")
    settings = [f"--config={tmp_path / 'run/config.yaml'}", "--parallel.data=2", "--devices=cpu:1", "--steps=1"]
    settings += ["--data.type=MockConfig", "--batch.global_size=2", "--model.sequence_length=16", "--schedule.lr=0.01"]
    settings += ["--evaluation.every=none", "--evaluation.at_end=false", "--schedule.warmup_fraction=0"]
    settings += [f"--checkpoint.local.folder={tmp_path / 'local'}", "--checkpoint.local.every=1"]
    with gangs.started(tmp_path) as start:
        gang = start(*gangs.launcher(), *gangs.TRAIN, *settings, f"--run_dir={tmp_path / 'tuned'}")
        assert gang.wait() == 0, gang.text
    assert gang.text.count("for exports: tokenizer.json, ") == 1
    convert(f"--from={tmp_path / 'tuned'}", f"--to=hf:{tmp_path / 'back'}")
    demand_same(tmp_path / "back", llama)


def test_a_damaged_record_of_the_origin_is_refused() -> None:
    records = [], {"dtype": "int8"}, {"dtypes": {"a": "no"}}, {"settings": "x"}, {"other": ""}, {"names": {"a": 1}}
    for record in records:
        with user_error():
            Provenance.of_meta({"source": record}, "runs/a")
    assert Provenance.of_meta({}, "runs/a") == Provenance()


def test_links_out_of_a_source_are_not_followed(llama, tmp_path) -> None:
    source = write_folder(tmp_path / "theirs")
    (source / "chat_template.jinja").unlink()
    (tmp_path / "secret").write_text("secret")
    (source / "chat_template.jinja").symlink_to(tmp_path / "secret")
    cfg = fresh(load_config_of(source), checkpoint=CheckpointConfig(load=Path(f"hf:{source}")))
    with user_error():
        one_step(cfg, tmp_path / "run")


def test_a_run_of_a_mean_reads_its_own_copy_of_the_tokenizer(llama, tmp_path) -> None:
    copy = write_folder(tmp_path / "theirs")
    convert(f"--from=hf:{copy}", f"--to={tmp_path / 'run'}")
    convert(f"--average={tmp_path / 'run/0'},{tmp_path / 'run/0'}", f"--to={tmp_path / 'mean'}")
    tokenizer = load(tmp_path / "mean/config.yaml").tokenizer
    assert tokenizer.path == str(tmp_path / "mean/tokenizer/tokenizer.json") and tokenizer.eod == "</s>"
