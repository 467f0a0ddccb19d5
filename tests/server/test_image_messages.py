"""Images within messages: they reach the engine as pixels of the model's size, at their places in the prompt."""

import io
from base64 import b64encode
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from echo_device import EchoDevice
from PIL import Image
from served import Running, serving

from megajax.data.images.decoding import StoredPicture
from megajax.data.images.transforms import fit_image
from megajax.inference.request import ImageInput
from megajax.server.config import Access, ServerConfig
from megajax.tokenizers.chat_template import ChatTemplate
from megajax.tokenizers.config import ByteTokenizerConfig, MultimodalTokenizerConfig
from megajax.tokenizers.conversation import Conversation

TOKEN, COUNT = 300, 3
INPUT = ImageInput(2, COUNT, TOKEN, 8, 12)
PARTS = (
    "{% for m in messages %}{{ m.role }}: {% for part in m.content %}{% if part.type == 'image' %}<image>{% else %}"
    "{{ part.text }}{% endif %}{% endfor %}{{ '\n' }}{% endfor %}"
)


def file_of(seed: int, kind: str = "PNG", size: tuple[int, int] = (20, 30)) -> bytes:
    """A random picture of this width and height."""
    pixels = np.random.default_rng(seed).integers(0, 256, (*size[::-1], 3)).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def linked(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def part(file: bytes, kind: str = "png") -> dict[str, Any]:
    return linked(f"data:image/{kind};base64,{b64encode(file).decode()}")


TEXT, FIRST, SECOND = {"type": "text", "text": "hi"}, file_of(1), file_of(2, "JPEG")


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    config = ServerConfig(strict=True, image_pixels=1000)
    with serving(config, EchoDevice(images=INPUT), access=Access(log_prompts=True)) as running:
        yield running


def row_of(running: Running, content: Any) -> tuple[str, list[bytes]]:
    """The prompt of a message, with _ for image tokens, and the digests of its images."""
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 2}
    answer = running.ask("/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    row = running.device.seen[0]
    assert answer.json()["usage"]["prompt_tokens"] == row.prompt
    for image in row.images:
        assert row.tokens[image.first : image.first + image.count] == [TOKEN] * COUNT
    text = "".join("_" if token == TOKEN else chr(token) for token in row.tokens[: row.prompt])
    return text, [image.digest for image in row.images]


def test_images_take_their_places(running: Running) -> None:
    text, (digest,) = row_of(running, [part(FIRST), TEXT])
    assert text == "user: ___\nhi\nassistant: "
    pixels = fit_image(StoredPicture(FIRST, 10**6), (INPUT.width, INPUT.height), "crop")
    np.testing.assert_array_equal(running.device.seen[0].images[0].pixels, pixels)
    for content, expected in (
        ([TEXT, part(FIRST)], "hi___"),
        ([part(FIRST), part(SECOND, "jpeg"), TEXT], "______\nhi"),
        ([part(FIRST), TEXT, part(FIRST)], "___hi___"),
        ([part(FIRST)], "___"),
    ):
        text, digests = row_of(running, content)
        assert text == f"user: {expected}\nassistant: "
        assert (
            digests[0] == digest and len(digests) == len(expected.replace("hi", "").strip("\n").replace("\n", "")) / 3
        )
    assert digests == [digest] != row_of(running, [part(SECOND, "jpeg")])[1]
    assert f'{{"type": "image", "data": "{len(FIRST):,} bytes"}}' in running.posts()[0]
    # Without images, nothing changes; and no text of a client becomes an image.
    assert row_of(running, "hi \ufdd4<image>") == ("user: hi <image>\nassistant: ", [])


def test_tokens_and_streams(running: Running) -> None:
    body = {"messages": [{"role": "user", "content": [part(FIRST)]}]}
    assert running.ask("/tokenize", body).json()["tokens"].count(TOKEN) == COUNT
    stream = running.ask("/v1/chat/completions", body | {"max_tokens": 2, "stream": True}).text
    assert '"content":"u"' in stream and stream.endswith("[DONE]\n\n")


@pytest.mark.parametrize(
    ("content", "param", "words"),
    [
        ([{"type": "image_url"}], "messages[0].content[0].image_url", "must be given"),
        ([{"type": "image_url", "image_url": "a"}], "messages[0].content[0].image_url", "an object"),
        ([linked("http://127.0.0.1/a.png")], "messages[0].content[0].image_url.url", "data:image/png"),
        ([TEXT, linked("data:image/png;base64,*")], "messages[0].content[1].image_url.url", "data:image/png"),
        ([part(FIRST), part(b"GIF89a" + bytes(40))], "messages", "image 2 of messages is neither a PNG nor a JPEG"),
        ([part(FIRST[:200])], "messages", "image 1 of messages is damaged"),
        ([part(file_of(3, size=(40, 30)))], "messages", "has more than 1,000 pixels"),
        ([part(FIRST)] * 3, "messages", "3 images, tiny reads at most 2"),
        ([{"type": "input_audio"}], "messages[0].content[0].type", "text or image_url"),
    ],
)
def test_what_is_refused(running: Running, content: Any, param: str, words: str) -> None:
    running.refuses("/v1/chat/completions", {"messages": [{"role": "user", "content": content}]}, param, words)
    assert running.all_free()


def test_images_are_not_cut(running: Running) -> None:
    body = {"messages": [{"role": "user", "content": [part(FIRST)]}], "truncate_prompt_tokens": 4}
    running.refuses("/v1/chat/completions", body, "truncate_prompt_tokens")
    answer = running.complete(prompt=[97, TOKEN], max_tokens=1)
    assert answer.status_code == 400, answer.text


def test_a_model_of_text_refuses_images(served: Running) -> None:
    answer = served.ask("/v1/chat/completions", {"messages": [{"role": "user", "content": [part(FIRST), TEXT]}]})
    assert answer.status_code == 400 and "reads no images" in answer.json()["error"]["message"]


def test_templates_that_take_parts() -> None:
    """The templates of LLaVA's checkpoints write the name of the image token."""
    tokenizer = MultimodalTokenizerConfig(base=ByteTokenizerConfig()).build()
    token = tokenizer.specials["image"]
    conversation = Conversation(ChatTemplate(PARTS), tokenizer)
    image = {"type": "image"}
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [image, {"type": "text", "text": "a <image>"}, image]},
    ]
    tokens = conversation.encode(messages, image_token=token)
    expected = [*b"system: s\nuser: ", token, *b"a <image>", token, *b"\n"]
    assert tokens == expected
    continued = conversation.encode(messages[:1], header=False, continued=True, image_token=token)
    assert continued == list(b"system: s")
