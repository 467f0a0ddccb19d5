"""Real processes that serve a model together give the answers of one process, and end together."""

import base64
import io
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from gangs import Started, free_port
from hugging_face_folders import MIXTRAL, mixtral_shapes, write, write_adapter
from PIL import Image
from test_hugging_face_decoders import LATENT_SIZES, TINY
from test_huggingface_encoders import BERT, LLAVA, described
from waiting import wait_until

from megajax.layers.lora.config import LoRAConfig
from megajax.processes.world import COORDINATOR, COUNT, INDEX

pytestmark = pytest.mark.slow
TWO = ("--devices=cpu:2", "--parallel.expert=2", "--parallel.tensor=2")
ENGINE = ("--inference.rows=2", "--inference.chunk=8", "--inference.compute=float32")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """base: a mixture of experts; adapter: for its attention."""
    folder = tmp_path_factory.mktemp("models")
    write(folder / "base", MIXTRAL, mixtral_shapes(MIXTRAL), np.float32)
    lora = LoRAConfig(rank=2, alpha=6.0, targets=("*.mixer.query", "*.mixer.key"))
    write_adapter(folder / "adapter", folder / "base", lora)
    return folder


def healthy(url: str) -> bool:
    try:
        return httpx2.get(f"{url}/health", verify=False).status_code == 200
    except httpx2.ConnectError:
        return False


class Gang:
    """Processes of one server, or of one command."""

    def __init__(self, start: Callable[..., Started], verb: str, *words: object, processes: int = 2):
        port, module = free_port(), (sys.executable, "-m", f"megajax.{verb}")
        every = {COORDINATOR: f"127.0.0.1:{port}", COUNT: str(processes)}
        self.processes = [
            start(*module, *words, name=f"{verb}-{processes}-{index}", **every, **{INDEX: str(index)})
            for index in range(processes)
        ]

    @property
    def first(self) -> Started:
        return self.processes[0]

    def url(self) -> str:
        """The server's address, when it answers."""
        self.first.until(lambda: "sampling" in self.first.text)
        line = next(line for line in self.first.text.splitlines() if line.strip().startswith("address"))
        url = line.split()[1]
        self.first.until(lambda: healthy(url))
        return url

    def codes(self) -> list[int]:
        return [process.wait(100) for process in self.processes]


def ask(url: str, route: str, **body: Any) -> Any:
    answer = httpx2.post(f"{url}/v1/{route}", json=body, verify=False, timeout=300)
    assert answer.status_code == 200, answer.text
    return answer.json()


def answers(url: str, adapter: Path) -> list[list[float]]:
    """Log-probabilities of answers of all kinds, which tell the tokens, and embeddings."""
    prompts = [[1, 2, 3], [5, 6, 5, 6, 5, 6, 5, 6, 5, 6, 11], [9]]
    greedy = {"prompt": prompts, "max_tokens": 9, "temperature": 0, "logprobs": 0}
    found = ask(url, "completions", **greedy)["choices"]
    found += ask(url, "completions", prompt=[1, 2, 3], max_tokens=6, temperature=1, seed=3, logprobs=2)["choices"]
    found += ask(url, "completions", prompt=prompts[1], max_tokens=2, temperature=0, logprobs=1, echo=True)["choices"]
    found += ask(url, "completions", model="a", **greedy)["choices"]
    ask(url, "load_lora_adapter", lora_name="b", lora_path=str(adapter))
    found += ask(url, "completions", model="b", **greedy)["choices"]
    vectors = [data["embedding"] for data in ask(url, "embeddings", input=prompts)["data"]]
    return [[score or 0.0 for score in choice["logprobs"]["token_logprobs"]] for choice in found] + vectors


def test_answers_are_those_of_one_process(folder: Path, start: Callable[..., Started]) -> None:
    """The server has adapters and drafts, and answers with scores of prompts and embeddings too.

    A signal to either process ends both.
    """
    slots = ("--inference.adapters=2", "--inference.adapter_rank=2", "--server.load_adapters=true")
    slots += ("--inference.warm_up=false",)
    model = (f"--hf={folder / 'base'}", f"--adapters=a={folder / 'adapter'}", "--inference.speculate=2", "--port=0")
    one = Gang(start, "serve", "--devices=cpu:1", *model, *ENGINE, *slots, processes=1)
    expected = answers(one.url(), folder / "adapter")
    one.first.end()
    two = Gang(start, "serve", *TWO, *model, *ENGINE, *slots)
    found = answers(two.url(), folder / "adapter")
    assert "4 cpu: expert 2, tensor 2" in two.first.text and "a; 2 slots of rank 2" in two.first.text
    for one_answer, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one_answer, other, rtol=1e-5, atol=1e-5)
    two.processes[1].process.send_signal(signal.SIGTERM)
    assert two.codes() == [0, 0]
    assert "Traceback" not in two.first.text + two.processes[1].text


def png() -> str:
    """A small image as the URL of a message."""
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (8, 8, 3), np.uint8)).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def vectors(url: str) -> list[list[float]]:
    inputs = [[1, 2, 3], [5, 6], [7] * 9]
    return [data["embedding"] for data in ask(url, "embeddings", input=inputs)["data"]]


def completed(url: str) -> list[list[float]]:
    greedy = {"max_tokens": 6, "temperature": 0, "ignore_eos": True, "logprobs": 0}
    choices = ask(url, "completions", prompt=[[1, 2, 3], [5, 6], [7] * 9], **greedy)["choices"]
    return [choice["logprobs"]["token_logprobs"] for choice in choices]


def described_image(url: str) -> list[list[float]]:
    content = [{"type": "text", "text": "1 2 "}, {"type": "image_url", "image_url": {"url": png()}}]
    greedy = {"max_tokens": 5, "temperature": 0, "ignore_eos": True, "logprobs": True}
    (choice,) = ask(url, "chat/completions", messages=[{"role": "user", "content": content}], **greedy)["choices"]
    return [[entry["logprob"] for entry in choice["logprobs"]["content"]]]


KINDS: dict[str, tuple[dict[str, Any], Callable[[str], list[list[float]]], tuple[str, ...]]] = {
    "embeddings": (BERT, vectors, ()),
    "heads that draft": (
        {"model_type": "deepseek_v3", **TINY, **LATENT_SIZES, "num_nextn_predict_layers": 1},
        completed,
        ("--inference.drafts=mtp", "--inference.speculate=2"),
    ),
    "images": (
        LLAVA,
        described_image,
        ("--inference.template={% for message in messages %}{{ message.content }}{% endfor %}",),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_programs_beside_the_decoder_answer_as_in_one_process(
    kind: str, start: Callable[..., Started], tmp_path: Path
) -> None:
    """Programs of encoders, which run before its steps or alone, and those of heads, which run after them."""
    config, answer, more = KINDS[kind]
    shapes = {tensor.name: tensor.shape() for tensor in described(config).table}
    write(tmp_path / "model", config, shapes, np.float32)
    words = (f"--hf={tmp_path / 'model'}", "--port=0", *ENGINE, *more)
    expected = answer(Gang(start, "serve", "--devices=cpu:1", *words, processes=1).url())
    two = Gang(start, "serve", "--devices=cpu:2", "--parallel.tensor=2", *words)
    for found, wanted in zip(answer(two.url()), expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
    assert "4 cpu: data 2, tensor 2" in two.first.text
    assert ("tokens in a step, by" in two.first.text) == (kind == "heads that draft")
    two.first.process.send_signal(signal.SIGTERM)
    assert two.codes() == [0, 0]


def serving(folder: Path, start: Callable[..., Started], *more: str) -> tuple[Gang, str]:
    """A server of two processes that has answered a request."""
    model = (f"--hf={folder / 'base'}", "--port=0", "--inference.warm_up=false", "--server.drain_seconds=5")
    gang = Gang(start, "serve", *TWO, *model, *ENGINE, *more)
    url = gang.url()
    assert ask(url, "completions", prompt=[1, 2, 3], max_tokens=3)["choices"]
    return gang, url


def test_the_server_ends_with_a_lost_process(folder: Path, start: Callable[..., Started]) -> None:
    gang, _ = serving(folder, start)
    gang.processes[1].process.kill()
    assert gang.codes() == [1, -signal.SIGKILL]
    pid = gang.processes[1].process.pid
    lines = [line for line in gang.first.text.splitlines() if "has ended" in line]
    assert len(lines) == 1 and lines[0].startswith("megajax: process 1 (") and f"pid {pid}) has ended" in lines[0]


def test_the_server_ends_with_a_process_that_hangs(folder: Path, start: Callable[..., Started]) -> None:
    """Its connection lives on: it is missed by the first request."""
    gang, url = serving(folder, start, "--server.stall_seconds=15")
    hanging = gang.processes[1].process
    hanging.send_signal(signal.SIGSTOP)
    with pytest.raises(httpx2.HTTPError):
        ask(url, "completions", prompt=[1, 2, 3], max_tokens=3)
    assert gang.first.wait() == 124
    (line,) = [line for line in gang.first.text.splitlines() if "did not run" in line]
    assert f"pid {hanging.pid}) did not run the operations of process 0 for 15 s" in line
    hanging.send_signal(signal.SIGCONT)
    assert gang.processes[1].wait() == 1


def test_others_end_with_the_server(folder: Path, start: Callable[..., Started]) -> None:
    """The others end at once if the server is lost."""
    gang, url = serving(folder, start)
    gang.first.process.kill()
    assert gang.codes() == [-signal.SIGKILL, 1]
    assert "megajax: process 0 has ended; this process ends as well" in gang.processes[1].text
    with pytest.raises(httpx2.HTTPError):
        ask(url, "completions", prompt=[1])


def test_a_failure_ends_all_processes(folder: Path, start: Callable[..., Started], tmp_path: Path) -> None:
    """Process 0 names the first cause: here a weight that only the other process can't read."""
    # Devices are set here, because the other process has imported jax before it reads its command line.
    model = (f"--hf={folder / 'base'}", "--port=0", *TWO[1:], *ENGINE)
    every = {COORDINATOR: f"127.0.0.1:{free_port()}", COUNT: "2", "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}
    (tmp_path / "sitecustomize.py").write_text(
        "import megajax.interop.weights.foreign as foreign\n"
        "def read(self, path, box): raise OSError('the disk is gone')\n"
        "foreign.ForeignWeights.read = read\n"
    )
    module = (sys.executable, "-m", "megajax.serve")
    first = start(*module, *model, name="first", **every, **{INDEX: "0"})
    paths = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    other = start(*module, *model, name="other", PYTHONPATH=paths, **every, **{INDEX: "1"})
    assert other.wait(100) == 1 and first.wait(100) == 1
    assert wait_until(lambda: "failed: OSError: the disk is gone; this process ends as well" in first.text), first.text


def test_generate_runs_in_several_processes(folder: Path, start: Callable[..., Started], tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("1 2 3", "5 6 7 8 9 10 11", "4")))
    words = [f"--hf={folder / 'base'}", f"--prompts={prompts}", "--temperature=0", "--max-tokens=6", "--logprobs=0"]
    outputs = {}
    for processes, layout in ((1, ("--devices=cpu:1",)), (2, TWO)):
        output = tmp_path / f"{processes}.jsonl"
        gang = Gang(start, "generate", *words, *ENGINE, f"--output={output}", *layout, processes=processes)
        assert gang.codes() == [0] * processes, gang.first.text
        outputs[processes] = [json.loads(line) for line in output.read_text().splitlines()]
    assert len(outputs[1]) == 3
    for one, two in zip(outputs[1], outputs[2], strict=True):
        assert one["text"] == two["text"]
