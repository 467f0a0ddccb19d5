"""Renews qwen3_vl.tar.xz: a tiny Qwen3-VL of transformers, with rows, their logits and greedy continuations; and
qwen3_vl_gradients.npz: the loss of these rows on some of their tokens, and sums of its gradients.

Run with torch, torchvision and transformers 5: python tests/interop/make_qwen3_vl.py [DRAW]
DRAW: new weights. The settings of model and images, and the rows with their pictures, are those of the archive.
"""

import io
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

FILE = Path(__file__).with_name("qwen3_vl.tar.xz")
ROWS, SUMS, NEW = ("text", "one", "several", "start", "end"), 3, 6


def drawn(folder: Path) -> None:
    """Weights for which every setting matters."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    made = Qwen3VLForConditionalGeneration(Qwen3VLConfig.from_pretrained(folder))
    with torch.no_grad():
        for name, weight in made.named_parameters():
            weight.normal_(1.0 if "norm" in name and name.endswith("weight") else 0.0, 0.2)
    made.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)


def scores(made: Any, tokens: torch.Tensor, images: dict[str, Any]) -> torch.Tensor:
    """Logits of a whole row: with a cache, transformers has other positions after a row that ends in an image."""
    made.model.rope_deltas = None
    inputs = {"input_ids": tokens[None], "attention_mask": torch.ones_like(tokens[None]), **images}
    if images:
        inputs["mm_token_type_ids"] = (tokens[None] == made.config.image_token_id).int()
    return made(**inputs).logits[0]


def greedy(made: Any, tokens: torch.Tensor, images: dict[str, Any]) -> list[int]:
    length = len(tokens)
    for _ in range(NEW):
        last = scores(made, tokens, images)[-1].clone()
        last[made.config.image_token_id] = -torch.inf
        tokens = torch.cat([tokens, last.argmax()[None]])
    return tokens[length:].tolist()


def main(names: list[str]) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder, draw, total, count = Path(temporary), np.random.default_rng(0), torch.zeros(()), 0
        with tarfile.open(FILE) as archive:
            archive.extractall(folder, filter="data")
        if names:
            drawn(folder)
        made = Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
        processor, rows = Qwen2VLImageProcessorPil.from_pretrained(folder), dict(np.load(folder / "rows.npz"))
        arrays = dict[str, np.ndarray]()
        for name in ROWS:
            tokens = torch.tensor(rows[f"{name}.tokens"], dtype=torch.long)
            pictures = [rows[key] for key in sorted(rows) if key.startswith(f"{name}.picture.")]
            images = processor(pictures, return_tensors="pt", input_data_format="channels_last") if pictures else {}
            logits = scores(made, tokens, dict(images))
            rows[f"{name}.logits"] = logits.detach().numpy()
            with torch.no_grad():
                rows[f"{name}.greedy"] = np.array(greedy(made, tokens, dict(images)), np.int32)
            # Of the labels, which are no image tokens, most count.
            mask = (draw.random(len(tokens) - 1) < 0.7) & (tokens[1:] != made.config.image_token_id).numpy()
            arrays[f"{name}.loss_mask"] = mask
            losses = torch.nn.functional.cross_entropy(logits[:-1], tokens[1:], reduction="none")
            total, count = total + losses[torch.tensor(mask)].sum(), count + int(mask.sum())
        (total / count).backward()
        arrays["loss"] = np.array(total.item() / count)
        parameters = sorted(made.named_parameters())
        arrays |= {"names": np.array([name for name, _ in parameters]), "sums": np.zeros((len(parameters), 1 + SUMS))}
        for number, (_, weight) in enumerate(parameters):
            gradient = weight.grad.double().numpy().ravel()
            signs = np.random.default_rng(number).choice([-1.0, 1.0], (SUMS, gradient.size))
            arrays["sums"][number] = [np.linalg.norm(gradient), *signs @ gradient]
        np.savez_compressed(FILE.with_name("qwen3_vl_gradients.npz"), **arrays)
        np.savez_compressed(folder / "rows.npz", **rows)
        with tarfile.open(FILE, "w:xz") as archive:
            for path in sorted(folder.iterdir()):
                entry, data = tarfile.TarInfo(path.name), path.read_bytes()
                entry.size = len(data)
                archive.addfile(entry, io.BytesIO(data))
        print(arrays["loss"])


if __name__ == "__main__":
    main(sys.argv[1:])
