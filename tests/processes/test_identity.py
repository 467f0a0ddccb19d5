"""What processes compare before they connect, and the messages about differences."""

import json
import shutil
from pathlib import Path

import megajax
from megajax.config.config_files import load
from megajax.processes import identity as of_process
from megajax.processes.identity import SECTION_BYTES, SETTINGS_BYTES, code_digests, find_identity, section, user_code
from megajax.processes.must_be_equal import IDENTITY, IdentitySection, difference
from megajax.processes.rendezvous_process_zero import MESSAGE_BYTES, parse_hello
from megajax.processes.xla_options import program_variables

PACKAGE = Path(megajax.__file__).parent


def test_equal_processes_do_not_differ():
    config = load("gpt2.py:debug")
    flags = {"skip_train": False}
    assert difference(find_identity(config, flags), find_identity(config, flags)) is None
    # Cache folders may be local.
    cache = load("gpt2.py:debug", "xla.compile_cache_dir=/local/cache")
    assert difference(find_identity(cache, flags), find_identity(config, flags)) is None


def test_settings_and_flags_are_named():
    first, second = load("gpt2.py:debug"), load("gpt2.py:debug", "seed=7", "schedule.lr=0.5", "model.dropout=0.2")
    text = difference(find_identity(second, {"skip_train": True}), find_identity(first, {"skip_train": False}))
    assert text is not None and text.startswith("settings: ")
    for part in (
        "--skip-train True (process 0: default)",
        f"schedule.lr 0.5 (process 0: {first.schedule.lr})",
        "seed 7 (process 0: default)",
        "the same config file and command line",
    ):
        assert part in text
    assert difference(find_identity(first, {}), find_identity(None, {})) is not None


def test_many_differences_are_counted_and_long_values_shortened():
    many = {"settings": section({f"name{number}": "x" * 500 for number in range(9)})}
    text = difference(many, {"settings": section({f"name{number}": "y" * 500 for number in range(9)})})
    assert text is not None and "and 5 more" in text and len(text) < 1200
    # Values that do not fit are compared too.
    longer = {"settings": section({f"name{number}": "x" * 70 for number in range(90)})}
    text = difference(longer, many)
    assert text is not None and text.startswith("settings: digest ") and longer["settings"].values is None


def test_versions_are_named(monkeypatch):
    actual, former = find_identity(None, {}), of_process.version
    others = {"optax": "0.0.9", "nvidia-cudnn-cu12": "9.1"}
    monkeypatch.setattr(of_process, "version", lambda name: others.get(name) or former(name))
    actual["versions"].values.pop("nvidia-cudnn-cu12", None)
    text = difference(find_identity(None, {}), actual)
    assert text == (
        f"versions: nvidia-cudnn-cu12 9.1 (process 0: not installed), optax 0.0.9 (process 0: {former('optax')}); "
        "install the same versions for all processes"
    )


def test_code_is_compared_by_folder_and_not_by_place(tmp_path):
    names = ("optim", "processes/world.py", "train.py")
    for place in ("a", "b"):
        for name in names:
            (tmp_path / place / name).parent.mkdir(parents=True, exist_ok=True)
            copy = shutil.copytree if (PACKAGE / name).is_dir() else shutil.copy
            copy(PACKAGE / name, tmp_path / place / name)
    first, second = (code_digests(tmp_path / place) for place in ("a", "b"))
    assert first == second and first.keys() == {"optim", "processes", "*.py"}
    (tmp_path / "b/processes/world.py").rename(tmp_path / "b/processes/worlds.py")
    (tmp_path / "b/configs").mkdir()
    (tmp_path / "b/configs/own.py").write_text("1")
    (tmp_path / "b/optim/__pycache__").mkdir(exist_ok=True)
    (tmp_path / "b/optim/__pycache__/new.pyc").write_text("1")
    third = code_digests(tmp_path / "b")
    assert {name for name in first if first[name] != third[name]} == {"processes"} and third.keys() == first.keys()


def test_the_code_is_that_of_the_package_alone(monkeypatch):
    """They are not those of the folder that the package is in, such as a checkout with its environment."""
    folders = list[Path]()
    monkeypatch.setattr(of_process, "code_digests", lambda folder: folders.append(folder) or {})
    find_identity(None, {})
    assert folders == [PACKAGE]


def test_files_of_the_user_are_code(tmp_path):
    (tmp_path / "rates.py").write_text("LR = 0.25\n")
    file = tmp_path / "mine.py"
    text = "from megajax.config.config_files import load\nfrom rates import LR\n\n\ndef config():\n    return {}\n"
    file.write_text(text.format("load('gpt2.py:debug', f'schedule.lr={LR}')"))
    config = load(str(file))
    digests = user_code(config)
    assert digests.keys() >= {"mine.py", "rates.py"}
    (tmp_path / "rates.py").write_text("LR = 0.25  # changed\n")
    assert {name for name, digest in user_code(config).items() if digest != digests[name]} == {"rates.py"}


def test_files_that_a_config_class_builds_from_are_code(tmp_path):
    """They are loaded only after the processes have connected."""
    (tmp_path / "rule.py").write_text("def build(cfg): ...\n")
    (tmp_path / "mine.py").write_text(
        "import dataclasses\nfrom typing import ClassVar\n\nfrom megajax.config.class_references import Builds\n"
        "from megajax.config.config_files import load\nfrom megajax.tokenizers.config import ByteTokenizerConfig\n\n\n"
        "@dataclasses.dataclass(frozen=True, kw_only=True)\nclass Tokens(Builds):\n"
        "    target: ClassVar[str] = 'rule.py:build'\n    size: int = 3\n\n\n"
        "def config():\n    return dataclasses.replace(load('gpt2.py:debug'), tokenizer=Tokens())\n"
    )
    config = load(str(tmp_path / "mine.py"))
    digests = user_code(config)
    (tmp_path / "rule.py").write_text("def build(cfg): return 1\n")
    assert {name for name, digest in user_code(config).items() if digest != digests[name]} == {"rule.py"}


def test_variables_that_decide_programs():
    environment = {
        "XLA_FLAGS": "--xla_gpu_autotune_level=0 --xla_dump_to=/tmp/here  --xla_cpu_enable_fast_math",
        "JAX_ENABLE_X64": "1", "JAX_DEFAULT_MATMUL_PRECISION": "highest", "NVIDIA_TF32_OVERRIDE": "0",
        "NCCL_ALGO": "Ring",
        "NCCL_LAUNCH_MODE": "GROUP",
        "JAX_COMPILATION_CACHE_DIR": "/cache", "JAX_PROCESS_ID": "1", "JAX_NUM_CPU_DEVICES": "2",
        "JAX_PLATFORMS": "cpu",
        "JAX_LOCAL_DEVICE_IDS": "3", "JAX_COORDINATOR_BIND_ADDRESS": "a:1", "JAX_LOG_COMPILES": "1",
        "JAX_DEBUG_INFS": "",
        "NCCL_DEBUG": "INFO", "NCCL_SOCKET_IFNAME": "eth0", "HOME": "/home/a", "LIBTPU_INIT_ARGS": "--a",
    }  # fmt: skip
    assert program_variables(environment) == {
        "XLA_FLAGS --xla_gpu_autotune_level": "0", "XLA_FLAGS --xla_cpu_enable_fast_math": "true",
        "JAX_ENABLE_X64": "1", "JAX_DEFAULT_MATMUL_PRECISION": "highest", "NVIDIA_TF32_OVERRIDE": "0",
        "NCCL_ALGO": "Ring",
        "NCCL_LAUNCH_MODE": "GROUP",
    }  # fmt: skip
    other = program_variables(environment | {"XLA_FLAGS": "--xla_cpu_enable_fast_math=false"})
    text = difference({"environment": section(other)}, {"environment": section(program_variables(environment))})
    assert text == (
        "environment: XLA_FLAGS --xla_cpu_enable_fast_math false (process 0: true), XLA_FLAGS --xla_gpu_autotune_level "
        "not set (process 0: 0); set these variables alike for all processes"
    )

    assert difference({"environment": section({"JAX_ENABLE_X64": "1"})}, {"environment": section({})}) == (
        "environment: JAX_ENABLE_X64 1 (process 0: not set); set these variables alike for all processes"
    )


def line(identity: dict[str, IdentitySection]) -> bytes:
    """The message of a process with eight GPUs."""
    gpus = ["h" * 60, [f"GPU-{gpu:036}" for gpu in range(8)], None, False, 7, 8]
    fields = {"megajax": 2, "token": "t" * 32, "index": 9999, "count": 10000, "at": "a" * 100, "gpus": gpus}
    return json.dumps(fields | {"identity": identity}).encode()


def test_messages_with_long_sections_and_strange_names_fit():
    """If the message were too long, process 0 would ignore the process and wait for it."""
    names = ("a" * 250 + ".py", "zero\u200bwidth.py", "line\n.py")
    strange = section(dict.fromkeys(names, "1"))
    assert difference({"code": strange}, {"code": section(dict.fromkeys(names, "2"))}) is not None
    longest = {"settings": SETTINGS_BYTES} | dict.fromkeys(set(IDENTITY) - {"settings"}, SECTION_BYTES)
    full = {
        name: IdentitySection("d" * 16, {f"{number:06}": "v" * 60 for number in range(most // 74)})
        for name, most in longest.items()
    }
    for name in IDENTITY:
        assert longest[name] - 100 < len(json.dumps(full[name].values)) <= longest[name]
    for identity in (full, full | {"code": strange}):
        assert len(line(identity)) < MESSAGE_BYTES
        parsed = parse_hello(line(identity))
        assert parsed is not None and parsed["identity"] == identity
