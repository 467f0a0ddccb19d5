"""Files that the pages assume: texts, token files, runs, a vocabulary, a Megatron-LM script."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from megajax.data.preprocessing.preprocessing import preprocess_text
from megajax.tokenizers.config import ByteTokenizerConfig
from tests.docs.blocks import ROOT, blocks

LINES = [
    f"{index}: It is the same, said {name}, and went on."
    for index in range(200)
    for name in ("Ada", "Blaise", "Carl", "Dana")
]


def _corpus(folder: Path) -> None:
    (folder / "corpus.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in LINES), encoding="utf-8")


def _documents(folder: Path) -> None:
    texts = (" ".join(LINES[start : start + 8]) for start in range(0, len(LINES), 8))
    (folder / "corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")


def _paragraphs(folder: Path) -> None:
    (folder / "data").mkdir(exist_ok=True)
    (folder / "data/corpus.txt").write_text("\n\n".join(LINES * 20), encoding="utf-8")


def _megatron_script(folder: Path) -> None:
    shutil.copy(ROOT / "tests/interop/megatron/gpt3_175b.sh", folder / "pretrain_gpt3_175b.sh")
    flags = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32"
    flags += " --micro-batch-size 2 --global-batch-size 4 --train-iters 10 --lr 1e-3 --mock-data"
    flags += " --tokenizer-type NullTokenizer --vocab-size 255"
    (folder / "command.txt").write_text(f"torchrun pretrain_gpt.py {flags}\n")


def _shards_and_vocabulary(folder: Path) -> None:
    import tokenizers
    import zstandard

    (folder / "corpus").mkdir(exist_ok=True)
    for shard in range(2):
        text = "".join(json.dumps({"text": line}) + "\n" for line in LINES[shard::2])
        (folder / f"corpus/{shard}.jsonl.zst").write_bytes(zstandard.compress(text.encode()))
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(LINES, vocab_size=400, special_tokens=["<|endoftext|>"])
    tokenizer.save_model(str(folder))


def _token_files(folder: Path) -> None:
    (folder / "data").mkdir(exist_ok=True)
    for name in ("web", "code"):
        preprocess_text(LINES * 20, folder / "data" / name, ByteTokenizerConfig().build())


def _pairs(folder: Path) -> None:
    for language in ("de", "en"):
        (folder / f"train.{language}.txt").write_text("\n".join(LINES), encoding="utf-8")
    text = "".join(json.dumps({"de": line, "en": line}) + "\n" for line in LINES)
    (folder / "pairs.jsonl").write_text(text, encoding="utf-8")


def _file_of_flags(folder: Path) -> None:
    flags = {"num-layers": 2, "hidden-size": 64, "num-attention-heads": 2, "seq-length": 64, "micro-batch-size": 4}
    flags |= {"max-position-embeddings": 64, "train-iters": 10, "lr": 1e-4, "mock-data": True, "vocab-size": 256}
    flags |= {"tokenizer-type": "NullTokenizer", "global-batch-size": 8}
    (folder / "flags.yaml").write_text("".join(f"{name}: {value}\n" for name, value in flags.items()), encoding="utf-8")


def _checkpoint(folder: Path) -> None:
    import jax.numpy as jnp

    from megajax.checkpoint.config import CheckpointConfig

    if (folder / "runs/quickstart").exists():  # of the quickstart on an earlier page
        return
    with CheckpointConfig().build(folder / "runs/quickstart/checkpoints") as manager:
        manager.save(20, {"params": {"tokens": jnp.ones((256, 8))}, "step": jnp.int32(20)})


def _images(folder: Path) -> None:
    import io
    import tarfile

    from PIL import Image

    lines = []
    for number in range(20):
        name, colour = [("cat", "orange"), ("dog", "brown")][number % 2]
        path = folder / "data/pets" / name / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (96, 72), colour).save(path)
        lines.append({"image": f"pets/{name}/{number}.jpg", "caption": f"a {name}"})
        with tarfile.open(folder / f"data/pets-{number // 10}.tar", "a") as archive:
            archive.add(path, f"{number}.jpg")
            label = tarfile.TarInfo(f"{number}.cls")
            label.size = 1
            archive.addfile(label, io.BytesIO(b"%d" % (number % 2)))
    (folder / "data/pets.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def _megatron_checkpoint(folder: Path) -> None:
    from megajax.config import load
    from megajax.interop.megatron.checkpoints.format import write_model
    from megajax.interop.weights.foreign import declared_by
    from tests.interop.hugging_face_folders import random_weights

    model = load("gpt2.py:debug").model
    (folder / "checkpoints/gpt").mkdir(parents=True)
    write_model(folder / "checkpoints/gpt", model, random_weights(declared_by(model), scale=0.02))


def _hugging_face_folder(folder: Path) -> None:
    """The Llama of docs/huggingface.md, with a tokenizer of 257 tokens."""
    import tokenizers

    page = blocks(ROOT / "docs/huggingface.md")
    (script,) = [block.text for block in page if block.text.startswith("# make_llama.py")]
    subprocess.run([sys.executable, "-c", script.replace("256", "257")], cwd=folder, check=True)
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(LINES, vocab_size=257, special_tokens=["</s>"])
    tokenizer.save(str(folder / "llama/tokenizer.json"))


PREPARED: dict[str, tuple[Callable[[Path], None], ...]] = {
    "docs/getting_started.md": (_corpus, _megatron_script),
    "docs/checkpoints.md": (_checkpoint,),
    "docs/coming_from_hugging_face.md": (_documents, _hugging_face_folder),
    "docs/data.md": (_token_files,),
    "docs/config.md": (_paragraphs,),
    "docs/images.md": (_images,),
    "docs/megatron.md": (_megatron_script, _file_of_flags, _megatron_checkpoint),
    "docs/preprocess.md": (_shards_and_vocabulary, _pairs),
    "docs/models.md": (_documents,),
}
"""By page: files written into its folder before its first command."""

PRELUDES = {
    "docs/checkpoints.md": """
import jax, jax.numpy as jnp
state = {"params": {"weight": jnp.ones((4, 4))}, "step": jnp.zeros((), jnp.int32)}
like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state)
""",
    "docs/optimizers.md": "import megajax as mj\n",
}
"""By page: Python that comes before each of its programs, which only show the lines that matter."""


def prepare(page: str, folder: Path) -> None:
    for write in PREPARED.get(page, ()):
        write(folder)
