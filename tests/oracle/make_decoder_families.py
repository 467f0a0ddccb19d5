"""Writes decoder_families.tar.xz: tiny decoders of transformers with random weights, their logits and greedy tokens.

Run with transformers 5.24.0 and torch 2.13 on a CPU, for all folders or for some, which are made anew:

    python tests/oracle/make_decoder_families.py [NAME ...]

Each folder has config.json as transformers 5 writes it, config_published_style.json as older versions did, weights
that float16 holds exactly, and io.npz: input_ids [2, 24], logits in float32, loss, greedy (8 tokens after the first
16 of input_ids). Both config files give the same logits. For another family, put both into /tmp/families/NAME: with 2
to 4 layers, 64 tokens, and a value of each setting that is not its default.
"""

import io
import re
import shutil
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

FILE = Path(__file__).parent / "decoder_families.tar.xz"
ROOT = Path("/tmp/families")


def randomise(model: torch.nn.Module) -> None:
    """Weights for which every setting matters: norms, biases and tables are random too."""
    torch.manual_seed(0)
    ends = ("correction_bias", "expert_bias")
    biases = {name: buffer for name, buffer in model.named_buffers() if name.endswith(ends)}
    for name, weight in [*model.named_parameters(), *biases.items()]:
        if weight.ndim == 1:
            base = 0.0 if name.endswith("bias") or float(weight.abs().max()) == 0 else 1.0
            weight.copy_(base + 0.3 * torch.randn(weight.shape))
        else:
            weight.copy_(torch.randn(weight.shape) * 1.5 / weight.shape[-1] ** 0.5)


def opened(folder: Path) -> Any:
    """The model in float32, with its tables of rotary positions made anew."""
    # Falcon's eager attention adds its biases twice.
    kind = "sdpa" if folder.name.startswith("falcon") else "eager"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=kind)
    return model.eval()


def rename_dense(file: Path) -> None:
    """Layers of Kimi Linear without experts by their published names; transformers writes those of experts."""
    tensors, dense = load_file(file), r"\.block_sparse_moe\.(gate|up|down)_proj"
    if any(re.search(dense, name) for name in tensors):
        save_file({re.sub(dense, r".mlp.\1_proj", name): x for name, x in tensors.items()}, file, {"format": "pt"})


@torch.no_grad()
def make(folder: Path) -> None:
    config = transformers.AutoConfig.from_pretrained(folder)
    model = getattr(transformers, config.architectures[0])(config)
    randomise(model)
    # MiniMax' decays follow from the number of a layer; float16 would round them.
    kept = {name: x for name, x in model.half().state_dict().items() if not name.endswith(("slope_rate", "_decay"))}
    model.save_pretrained(folder, state_dict=kept)
    (folder / "generation_config.json").unlink(missing_ok=True)
    rename_dense(folder / "model.safetensors")
    torch.manual_seed(1)
    ids = torch.randint(3, config.vocab_size, (2, 24))
    model = opened(folder)
    out = model(ids, labels=ids)
    model.generation_config.eos_token_id = None
    greedy = model.generate(ids[:, :16], max_new_tokens=8, do_sample=False)
    other = shutil.copytree(folder, folder.with_name(f"{folder.name}_published"), dirs_exist_ok=True)
    shutil.copy(folder / "config_published_style.json", other / "config.json")
    assert torch.equal(opened(other)(ids).logits, out.logits)
    shutil.rmtree(other)
    tops = model(greedy).logits[:, 15:-1].topk(2).values
    margin = float((tops[..., 0] - tops[..., 1]).min())
    print(folder.name, "std", float(out.logits.std()), "least margin of greedy tokens", margin)
    results = {"input_ids": ids, "logits": out.logits, "loss": out.loss, "greedy": greedy}
    np.savez_compressed(folder / "io.npz", **{key: value.numpy() for key, value in results.items()})


def main(names: list[str]) -> None:
    with tarfile.open(FILE) as archive:
        found = {member.name.partition("/")[0] for member in archive}
        archive.extractall(ROOT, [one for one in archive if not (ROOT / one.name).exists()], filter="data")
    for name in names or sorted(found):
        make(ROOT / name)
    with tarfile.open(FILE, "w:xz") as archive:
        for path in sorted(path for path in ROOT.rglob("*") if path.is_file() and path.parent.name in {*names, *found}):
            entry, data = tarfile.TarInfo(str(path.relative_to(ROOT))), path.read_bytes()
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    print(FILE.stat().st_size, "bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
