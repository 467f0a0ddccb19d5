"""Writes qwen3_vl.tar.xz: a tiny Qwen3-VL of transformers, with rows, their logits and greedy continuations; and
qwen3_vl_gradients.npz: the loss of these rows on some of their tokens, and sums of its gradients.

Run with torch, torchvision and transformers 5: python tests/interop/make_qwen3_vl.py [FEATURES DEPTH FOLDER]
Only the gradients, of the stored model: python tests/interop/make_qwen3_vl.py gradients
"""

import io
import sys
import tarfile
import tempfile
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

IMAGE, LENGTH, LEAST, MOST = 120, 40, 16, 64
"""Token of images, tokens of a row, patches of the smallest and of the largest image."""
SUMS = 3
SIZES = {"text": [], "one": [(23, 30)], "several": [(16, 40), (9, 9), (60, 20)], "start": [(40, 8)], "end": [(24, 24)]}
"""Rows -> heights and widths of their images."""


def model(features: list[int], depth: int) -> Qwen3VLForConditionalGeneration:
    config = Qwen3VLConfig(
        text_config={
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128, "max_position_embeddings": 128,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [4, 2, 2],
                                "mrope_interleaved": True},
        },
        vision_config={
            "depth": depth, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4,
            "out_hidden_size": 32, "num_position_embeddings": 25, "deepstack_visual_indexes": features,
        },
        image_token_id=IMAGE, video_token_id=121, vision_start_token_id=122, vision_end_token_id=123,
    )  # fmt: skip
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    made = Qwen3VLForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, weight in made.named_parameters():
            weight.normal_(1.0 if "norm" in name and name.endswith("weight") else 0.0, 0.2)
    return made


def row(name: str, processor: Qwen2VLImageProcessorPil) -> dict[str, np.ndarray]:
    """Pictures, and the tokens of the prompt."""
    draw = np.random.default_rng(len(name))
    pictures = [draw.integers(0, 256, (*size, 3)).astype(np.uint8) for size in SIZES[name]]
    arrays = {f"{name}.picture.{n}": picture for n, picture in enumerate(pictures)}
    grids, tokens = [], [] if name == "start" else draw.integers(1, 100, 4).tolist()
    if pictures:
        read = processor(pictures, return_tensors="pt", input_data_format="channels_last")
        arrays[f"{name}.pixels"], grids = read["pixel_values"].numpy(), read["image_grid_thw"].numpy()
        arrays[f"{name}.grids"] = grids
    for _, rows, columns in grids:
        tokens += [IMAGE] * (rows * columns // 4) + ([] if name == "end" else draw.integers(1, 100, 2).tolist())
    return arrays | {f"{name}.tokens": np.array(tokens, np.int32)}


def answers(made: Qwen3VLForConditionalGeneration, name: str, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Logits of the prompt, and greedy tokens."""
    tokens = torch.tensor(arrays[f"{name}.tokens"], dtype=torch.long)[None]
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    if f"{name}.grids" in arrays:
        inputs |= {
            "pixel_values": torch.tensor(arrays[f"{name}.pixels"]),
            "image_grid_thw": torch.tensor(arrays[f"{name}.grids"]),
            "mm_token_type_ids": (tokens == IMAGE).int(),
        }
    length, greedy = tokens.shape[1], list[int]()
    with torch.no_grad():
        logits = made(**inputs).logits[0].numpy()
        # Whole rows: with a cache, transformers has other positions after a row that ends in an image.
        for _ in range(6):
            made.model.rope_deltas = None
            row = torch.cat([tokens, torch.tensor([greedy], dtype=torch.long)], dim=1)
            inputs |= {"input_ids": row, "attention_mask": torch.ones_like(row)}
            if "mm_token_type_ids" in inputs:
                inputs["mm_token_type_ids"] = (row == IMAGE).int()
            scores = made(**inputs).logits[0, -1]
            scores[IMAGE] = -torch.inf
            greedy.append(int(scores.argmax()))
        made.model.rope_deltas = None
    return {f"{name}.logits": logits[:length], f"{name}.greedy": np.array(greedy, np.int32)}


def gradients() -> None:
    """For each tensor: the length of its gradient, and its products with SUMS vectors of random signs."""
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(Path(__file__).with_name("qwen3_vl.tar.xz")) as archive:
            archive.extractall(folder, filter="data")
        made = Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
        processor, rows = Qwen2VLImageProcessorPil.from_pretrained(folder), dict(np.load(Path(folder) / "rows.npz"))
    draw, arrays, total, count = np.random.default_rng(0), dict[str, np.ndarray](), torch.zeros(()), 0
    for name in SIZES:
        tokens = torch.tensor(rows[f"{name}.tokens"], dtype=torch.long)[None]
        inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        if pictures := [rows[f"{name}.picture.{n}"] for n in range(len(SIZES[name]))]:
            inputs |= dict(processor(pictures, return_tensors="pt", input_data_format="channels_last"))
            inputs["mm_token_type_ids"] = (tokens == IMAGE).int()
        made.model.rope_deltas = None
        # Of the labels, which are no image tokens, most count.
        mask = (draw.random(tokens.shape[1] - 1) < 0.7) & (tokens[0, 1:] != IMAGE).numpy()
        arrays[f"{name}.loss_mask"] = mask
        losses = torch.nn.functional.cross_entropy(made(**inputs).logits[0, :-1], tokens[0, 1:], reduction="none")
        total, count = total + losses[torch.tensor(mask)].sum(), count + int(mask.sum())
    (total / count).backward()
    arrays["loss"] = np.array(total.item() / count)
    parameters = sorted(made.named_parameters())
    arrays |= {"names": np.array([name for name, _ in parameters]), "sums": np.zeros((len(parameters), 1 + SUMS))}
    for number, (_, weight) in enumerate(parameters):
        gradient = weight.grad.double().numpy().ravel()
        signs = np.random.default_rng(number).choice([-1.0, 1.0], (SUMS, gradient.size))
        arrays["sums"][number] = [np.linalg.norm(gradient), *signs @ gradient]
    np.savez_compressed(Path(__file__).with_name("qwen3_vl_gradients.npz"), **arrays)
    print(arrays["loss"])


def main() -> None:
    if sys.argv[1:] == ["gradients"]:
        return gradients()
    features, depth = [int(n) for n in sys.argv[1].split(",")] if sys.argv[1:] else [0, 2], int((*sys.argv, 4, 4)[2])
    made = model(features, depth)
    processor = Qwen2VLImageProcessorPil(
        patch_size=4, image_mean=[0.5] * 3, image_std=[0.5] * 3, min_pixels=LEAST * 16, max_pixels=MOST * 16
    )
    arrays: dict[str, np.ndarray] = {}
    for name in SIZES:
        arrays |= row(name, processor)
        arrays |= answers(made, name, arrays)
    kept = {name: array for name, array in arrays.items() if not name.endswith(".pixels")}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(sys.argv[3]) if sys.argv[3:] else Path(temporary)
        made.save_pretrained(folder)
        (folder / "generation_config.json").unlink(missing_ok=True)
        processor.save_pretrained(folder)
        np.savez_compressed(folder / "rows.npz", **kept)
        if not sys.argv[3:]:
            with tarfile.open(Path(__file__).with_name("qwen3_vl.tar.xz"), "w:xz") as archive:
                for path in sorted(folder.iterdir()):
                    entry, data = tarfile.TarInfo(path.name), path.read_bytes()
                    entry.size = len(data)
                    archive.addfile(entry, io.BytesIO(data))
    print({name: array.tolist() for name, array in arrays.items() if name.endswith(("greedy", "grids"))})


if __name__ == "__main__":
    main()
