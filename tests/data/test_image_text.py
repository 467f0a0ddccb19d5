"""Rows of text with images: image tokens, loss, tiles, and invalid lines."""

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from image_files import gradient, plain, saved
from user_errors import user_error

from megajax.batch import Leaf, Patches, Placeholder
from megajax.config.compose import problems_of
from megajax.data.images.config import ImageTextConfig, MockCaptionsConfig
from megajax.data.images.decoding import ArrayPicture
from megajax.data.images.transforms import affordable_tiles, fit_image, grid, tile_image
from megajax.data.rows.loader import read_rows
from megajax.data.rows.splits import Rows
from megajax.models.decoder.config import text_schema
from megajax.tokenizers.config import ByteTokenizerConfig, MultimodalTokenizerConfig

TOKEN, EOD = 257, 256
RED, BLUE = (255, 0, 0), (0, 0, 255)


def schema(
    length: int = 64, slots: int = 3, size: int = 8, vocabulary: int = 258, count: int = 2, token: int = TOKEN
) -> dict[str, Leaf]:
    images = Leaf("uint8", (slots, size, size, 3), (None,) * 4, placeholder=Placeholder(token, count))
    text = {name: leaf for name, leaf in text_schema(length, vocabulary).items() if not leaf.optional}
    return text | {"images": images}


def build(config: Any, rows: Rows | None = None, tokenizer: Any = None, **shape: int) -> Any:
    assert not problems_of(config)
    tokenizer = tokenizer or ByteTokenizerConfig().build()
    return config.build(tokenizer=tokenizer, schema=schema(**shape), rows=rows or Rows(None), seed=1)


def lines(folder: Path, *objects: Any, **options: Any) -> ImageTextConfig:
    saved(folder / "red.png", plain(RED, 8, 8))
    saved(folder / "blue.png", plain(BLUE, 8, 8))
    text = "\n".join(value if isinstance(value, str) else json.dumps(value) for value in objects)
    (folder / "rows.jsonl").write_text(text, encoding="utf-8")
    options = {"split": "1", "cache_dir": str(folder / "cache")} | options
    return ImageTextConfig(paths=(str(folder / "rows.jsonl"),), **options)


def turns(*texts: str) -> list[dict[str, str]]:
    return [{"from": ("human", "gpt")[place % 2], "value": text} for place, text in enumerate(texts)]


def ids(*parts: Any) -> list[int]:
    """Text as bytes, numbers unchanged."""
    return [token for part in parts for token in (part.encode() if isinstance(part, str) else [part])]


def check(row: Any, expected_ids: list[int], weighted: Iterable[Any]) -> None:
    """The row is this text, shifted by one for the labels, with loss on these parts."""
    length = len(row["tokens"])
    padded = np.array([*expected_ids, *[0] * (length + 1)], np.int32)
    assert row["tokens"].tolist() == padded[:length].tolist()
    assert row["labels"].tolist() == [*expected_ids[1:], *[0] * length][:length]
    marked = row["labels"][row["loss_mask"] == 1].tolist()
    assert marked == ids(*weighted)
    assert row["positions"].tolist() == list(range(length))
    assert row["padding"].tolist() == [place >= len(expected_ids) for place in range(length)]


def test_captions(tmp_path: Path) -> None:
    two = {"image": ["blue.png", "red.png"], "caption": "b"}
    config = lines(tmp_path, {"image": "red.png", "caption": "é!"}, "", two)
    rows = build(config).train
    rows_by_line = {rows.items.name(rows.item(row)).rpartition(" ")[2]: rows[row] for row in range(2)}
    assert rows_by_line.keys() == {"1", "3"}
    check(rows_by_line["1"], ids(TOKEN, TOKEN, "é!", EOD), ["é!", EOD])
    check(rows_by_line["3"], ids(*[TOKEN] * 4, "b", EOD), ["b", EOD])
    assert (rows_by_line["3"]["images"][0] == BLUE).all() and (rows_by_line["3"]["images"][1] == RED).all()
    assert not rows_by_line["3"]["images"][2].any() and rows_by_line["3"]["images"].dtype == np.uint8
    assert read_rows(rows, schema(), 0, np.arange(2))["images"].shape == (2, 3, 8, 8, 3)
    prompted = build(lines(tmp_path, {"image": "red.png", "caption": "x"}, prompt="a: ")).train[0]
    check(prompted, ids(TOKEN, TOKEN, "a: x", EOD), ["x", EOD])


def test_conversations(tmp_path: Path) -> None:
    talk = turns("<image>\nand <image> same?", "no", "sure?", "yes")
    row = build(lines(tmp_path, {"image": ["red.png", "blue.png"], "conversations": talk}), length=128).train[0]
    first = ids("user: ", TOKEN, TOKEN, "\nand ", TOKEN, TOKEN, " same?\nassistant: no\nuser: sure?\n")
    check(row, [*first, *ids("assistant: yes\n", EOD)], ["no\n", "yes\n", EOD])
    roles = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    line = {"messages": [*roles, {"role": "assistant", "content": "Ho"}]}
    options = {"template": "{% for m in messages %}{{ m.role[0] }}: {{ m.content }};{% endfor %}"}
    row = build(lines(tmp_path, line, **options)).train[0]
    check(row, ids("s: Be brief.;u: Hi;a: Ho;", EOD), ["a: Ho;", EOD])
    assert not row["images"].any()
    row = build(lines(tmp_path, line | {"image": "red.png"}, **options)).train[0]
    check(row, ids("s: Be brief.;u: ", TOKEN, TOKEN, "\nHi;a: Ho;", EOD), ["a: Ho;", EOD])


def test_the_tokenizer_gives_the_image_token(tmp_path: Path) -> None:
    """Conversations have the tokenizer's tokens, except for the number of image tokens."""
    tokenizer = MultimodalTokenizerConfig(base=ByteTokenizerConfig(), added={"more": "<more>"}).build()
    talk = turns("<image>a<more>", "b")
    config = lines(tmp_path, {"image": "red.png", "conversations": talk})
    row = build(config, tokenizer=tokenizer, vocabulary=259).train[0]
    ids = tokenizer.encode("user: <image>a<more>\nassistant: b\n").tolist()
    assert ids.count(257) == 1
    check(row, [*ids[:6], 257, 257, *ids[7:], EOD], ["b\n", EOD])
    with user_error():
        build(config, tokenizer=tokenizer, vocabulary=259, token=256)
    with user_error("model.image_token"):
        build(config, token=EOD)
    caption = lines(tmp_path, {"image": "red.png", "caption": "a <image>"})
    with user_error():
        build(caption, tokenizer=tokenizer, vocabulary=259).train[0]


def test_long_text_is_truncated_but_no_image(tmp_path: Path) -> None:
    row = build(lines(tmp_path, {"image": "red.png", "caption": "x" * 100})).train[0]
    assert row["loss_mask"].sum() == 63 and row["tokens"][-1] == row["labels"][-1] == ord("x")


def parted(*parts: dict[str, Any]) -> dict[str, Any]:
    """A line whose question is a list of parts."""
    return {"messages": [{"role": "user", "content": list(parts)}, {"role": "assistant", "content": "x"}]}


def test_a_system_message_in_the_middle_does_not_cut_a_conversation(tmp_path: Path) -> None:
    messages = [{"role": role, "content": role} for role in ("user", "assistant", "system", "assistant")]
    row = build(lines(tmp_path, {"image": "red.png", "messages": messages}), length=128).train[0]
    said = "".join(map(chr, row["labels"][row["loss_mask"] > 0][:-1]))
    assert said == "assistant\nassistant\n" and row["positions"].max() == 127


def test_messages_of_parts(tmp_path: Path) -> None:
    """The same row as of a text with markers."""
    image, text = {"type": "image", "image": "red.png"}, {"type": "text", "text": "and"}
    blue = {"type": "image_url", "image_url": {"url": "blue.png"}}
    whole = {"image": ["red.png", "blue.png"], "conversations": turns("<image>and<image>?", "x")}
    parts = parted(image, text, blue, text | {"text": "?"})
    ours, theirs = (build(lines(tmp_path, line)).train[0] for line in (parts, whole))
    assert ours.keys() == theirs.keys() and all((ours[name] == theirs[name]).all() for name in ours)


def patched(slots: int = 3, budget: int = 24) -> dict[str, Leaf]:
    """The schema of a model that reads images of any size, of 4 to 16 patches of 2 x 2 pixels."""
    stands = Placeholder(TOKEN, 4, patches=Patches(side=2, merge=2, least=4, most=16))
    images = Leaf("uint8", (budget, 12), (None, None), placeholder=stands)
    return text_schema(64, 258) | {"images": images, "grids": Leaf("int32", (slots, 2), (None, None))}


def built(config: ImageTextConfig, **shape: int) -> Any:
    options = {"tokenizer": ByteTokenizerConfig().build(), "schema": patched(**shape), "rows": Rows(None), "seed": 1}
    return config.build(**options).train


def test_images_of_any_size(tmp_path: Path) -> None:
    """The patches of each image follow those of the one before; each has as many tokens as squares of patches."""
    saved(tmp_path / "wide.png", gradient(16, 4))
    saved(tmp_path / "large.png", plain(RED, 80, 80))
    line = {"image": ["wide.png", "blue.png"], "caption": "x"}
    row = built(lines(tmp_path, line, before="<", after=">"), budget=32)[0]
    check(row, ids("<", *[TOKEN] * 4, "><", *[TOKEN] * 4, ">x", EOD), ["x", EOD])
    assert row["grids"].tolist() == [[2, 8], [4, 4], [0, 0]]
    first = np.asarray(gradient(16, 4))
    for place, (top, left) in enumerate(((0, 0), (0, 2), (2, 0), (2, 2), (0, 4))):
        assert (row["images"][place] == first[top : top + 2, left : left + 2].ravel()).all()
    assert (row["images"][16:].reshape(-1, 3) == BLUE).all()


@pytest.mark.parametrize(
    "images",
    [
        ["red.png"] * 2,
        ["red.png"] * 4,
    ],
)
def test_images_that_a_row_has_no_room_for(tmp_path: Path, images: list[str]) -> None:
    with user_error():
        built(lines(tmp_path, {"image": images, "caption": "x"}))[0]


def test_tiles_of_images_of_any_size_are_refused(tmp_path: Path) -> None:
    with user_error("data.tiles"):
        built(lines(tmp_path, {"image": "red.png", "caption": "x"}, tiles=2))


CAPTION = {"image": "red.png", "caption": "x"}
REFUSED = [
    ({"image": ["red.png"] * 4, "caption": "x"}, "too many images", "4 images, the model's rows have 3 slots"),
    ({"caption": "x"}, "caption without an image", "needs an image"),
    ({"image": "red.png", "caption": ""}, "no caption", "caption is ''"),
    ({"image": "red.png"}, "not a conversation", "the keys are 'image'"),
    ({"conversations": turns("<image>?", "x")}, "image marker without image", "1 x <image>, images: 0"),
    ({"image": "red.png", "conversations": turns("?", "<image>")}, "image marker without image", "an answer has"),
    ({"image": ["red.png"] * 2, "conversations": turns("<image>", "x")}, "image without a marker", "images: 2"),
    ({"conversations": turns("?")}, "no answer", "its roles: user"),
    ({"conversations": [{"from": "bird", "value": "x"}]}, "unknown role", "has the role 'bird'; known roles are"),
    ({"conversations": ["x"]}, "not a conversation", "message 1 is a str"),
    ({"image": "none.png", "caption": "x"}, "cannot be read", "none.png: No such file"),
    ({"image": 5, "caption": "x"}, "no image", "expected a path, found '5'"),
    ({"image": "data:image/png;base64," + "A" * 5000, "caption": "x"}, "no image", "a path, found 'data:image"),
    ({"image": "red.png", "conversations": turns("x" * 80, "y")}, "too long", "no caption or answer in the 64"),
    ({"image": "red.png", "conversations": turns("x" * 60 + "<image>", "y")}, "too long", "end at position 68"),
    ({"video": "a.mp4", "conversations": turns("?", "x")}, "video", "models read images alone"),
    (parted({"type": "video", "video": "a.mp4"}), "video", "models read images alone"),
    (parted({"type": "sound"}), "not a conversation", "a part of a message is \"{'type': 'sound'}\""),
    ("{not json", "no JSON", "Expecting"),
    ("[1, 2]", "no JSON", "expected an object"),
]


@pytest.mark.parametrize(("line", "reason", "detail"), REFUSED)
def test_refused_lines(tmp_path: Path, line: Any, reason: str, detail: str) -> None:
    with user_error() as error:
        rows = build(lines(tmp_path, CAPTION, line)).train
        [rows[row] for row in range(2)]
    assert detail in str(error.value)
    rows = build(lines(tmp_path, CAPTION, line, on_error="skip")).train
    assert [rows[row]["labels"][1] for row in range(2)] == [ord("x")] * 2 and rows.skipped == {reason: 1}


def test_files_that_do_not_fit(tmp_path: Path) -> None:
    config = lines(tmp_path, CAPTION)
    (tmp_path / "rows.jsonl").write_text("[\n{}]")
    with user_error():
        build(config)
    (tmp_path / "rows.jsonl").write_text("\n\r\n")
    with user_error():
        build(config)
    (tmp_path / "rows.jsonl").write_bytes(gzip.compress(b"{}"))
    with user_error():
        build(config)
    (tmp_path / "rows.jsonl").unlink()
    with user_error("data"):
        build(config)
    with user_error():
        build(lines(tmp_path, CAPTION), count=64)


def test_splits_and_order(tmp_path: Path) -> None:
    records = [{"image": "red.png", "caption": str(number)} for number in range(20)]
    splits = build(lines(tmp_path, *records, split="80,20"), Rows(40, None))
    assert splits.train.passes == 3 and len(splits.valid) == 4
    captions = [bytes(splits.train[row]["tokens"][2:4].astype(np.uint8)) for row in range(16)]
    captions += [bytes(splits.valid[row]["tokens"][2:4].astype(np.uint8)) for row in range(4)]
    assert len(set(captions)) == 20
    config = lines(tmp_path, *records)
    separate = ImageTextConfig(train_paths=config.paths, valid_paths=config.paths)
    assert len(build(separate, Rows(3, None)).valid) == 20


def internvl(width: int, height: int, most: int, size: int) -> tuple[int, int]:
    """find_closest_aspect_ratio of InternVL's code, by its definition."""
    ratios = {(i, j) for n in range(1, most + 1) for i in range(1, n + 1) for j in range(1, n + 1) if i * j <= most}
    best, difference = (1, 1), float("inf")
    for i, j in sorted(sorted(ratios), key=lambda ratio: ratio[0] * ratio[1]):
        distance = abs(width / height - i / j)
        if distance < difference:
            best, difference = (i, j), distance
        elif distance == difference and width * height > 0.5 * size * size * i * j:
            best = (i, j)
    return best


def test_grids_are_those_of_internvl() -> None:
    draw = np.random.default_rng(0)
    for width, height in [*draw.integers(20, 3000, (300, 2)).tolist(), (448, 448), (900, 900), (1800, 900)]:
        for most in (1, 6, 12):
            assert grid((width, height), (448, 448), most) == internvl(width, height, most, 448)


def test_tiles_are_in_row_order() -> None:
    picture = ArrayPicture(np.asarray(gradient(24, 16)))
    tiles = tile_image(picture, (8, 8), 6)
    assert len(tiles) == 7
    assert (np.concatenate([np.concatenate(tiles[k : k + 3], 1) for k in (0, 3)]) == gradient(24, 16)).all()
    assert tiles[6].shape == (8, 8, 3) and abs(tiles[6].mean(axis=(0, 1)) - (127, 127, 0)).max() < 4
    cases = [(1, 7, 6), (1, 7, 9), (2, 7, 6), (3, 7, 6), (1, 2, 6)]
    assert [affordable_tiles(*case) for case in cases] == [6, 6, 2, 1, 1]


def test_tiles_in_rows(tmp_path: Path) -> None:
    config = lines(tmp_path, {"image": "wide.png", "caption": "x"}, tiles=2)
    saved(tmp_path / "wide.png", gradient(32, 16))
    row = build(config).train[0]
    check(row, ids(*[TOKEN] * 6, "x", EOD), ["x", EOD])
    assert row["images"][0][..., 0].mean() < 70 and row["images"][1][..., 0].mean() > 180
    two = build(lines(tmp_path, {"image": ["wide.png"] * 2, "caption": "x"}, tiles=2)).train[0]
    assert two["tokens"].tolist().count(TOKEN) == 4 and two["images"][1].any() and not two["images"][2].any()
    with user_error("data.tiles"):
        build(config, slots=2)


def test_images_of_another_shape() -> None:
    picture = ArrayPicture(np.asarray(gradient(32, 16)))
    padded, cropped, resized = (fit_image(picture, (8, 8), fit) for fit in ("pad", "crop", "stretch"))
    assert (padded[:2] == (122, 116, 104)).all() and (padded[6:] == (122, 116, 104)).all()
    assert padded[2, 0, 0] < 30 and padded[5, -1, 0] > 220
    assert cropped[0, 0, 0] > 60 and cropped[0, -1, 0] < 200 and resized[0, 0, 0] < 30 and resized[0, -1, 0] > 220
    assert padded.shape == cropped.shape == resized.shape == (8, 8, 3)


def test_shapes_with_captions() -> None:
    rows = build(MockCaptionsConfig(), Rows(16), size=16, count=4).train
    tokenizer = ByteTokenizerConfig().build()
    for number in range(16):
        row = rows[number]
        text = tokenizer.decode(row["labels"][row["loss_mask"] == 1][:-1])
        brightest = row["images"][0].reshape(-1, 3).max(axis=0)
        assert ("red" in text) == (brightest[0] > 100 and brightest[1] < 100)
        assert text.split()[2] in ("disc", "square")


def test_several_shapes_of_any_size() -> None:
    """Each image has its words and its tokens; images differ in shape."""
    config, tokenizer = MockCaptionsConfig(images=2), ByteTokenizerConfig().build()
    rows = config.build(tokenizer=tokenizer, schema=patched(budget=32), rows=Rows(40), seed=1).train
    counts, grids = set(), set()
    for row in (rows[number] for number in range(40)):
        words = tokenizer.decode(row["labels"][row["loss_mask"] == 1][:-1]).split(" and ")
        used = [tuple(grid) for grid in row["grids"].tolist() if any(grid)]
        assert len(words) == len(used) and (row["tokens"] == TOKEN).sum() == sum(a * b for a, b in used) // 4
        counts.add(len(words))
        grids.update(used)
    assert counts == {1, 2} and len(grids) > 1
    with user_error("data.images"):
        build(config, slots=1)


def test_settings() -> None:
    config = ImageTextConfig(tiles=0, marker="")
    assert [problem.setting for problem in problems_of(config)] == ["tiles", "marker", "paths"]
