"""Prompts, answers and conversations at a terminal, on a device without a model."""

import io
import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from stand_in import StandIn, expected
from user_errors import user_error

from megajax.command_line.parser import Flag
from megajax.config.errors import ConfigError, UserError
from megajax.generate import main
from megajax.inference.admission import AnswerRules
from megajax.inference.engine import Engine
from megajax.inference.prompt_and_answer_files import Prompt, encode, read_prompts
from megajax.inference.request import ImageInput
from megajax.inference.sampling_settings import Sampling, sampling_flags, sampling_of
from megajax.inference.terminal import Screen, Session
from megajax.inference.worker import complete
from megajax.tokenizers.chat_template import ChatTemplate
from megajax.tokenizers.config import ByteTokenizerConfig
from megajax.tokenizers.conversation import Conversation

BYTES = ByteTokenizerConfig().build()
GREEDY = Sampling(max_tokens=6, temperature=0.0, ignore_eos=True)


def session(sampling: Sampling = GREEDY, device: StandIn | None = None, queue: int = 2) -> tuple[Session, io.StringIO]:
    device = device or StandIn(vocabulary=257, length=256, blocks=256)
    engine = Engine(device, AnswerRules(tokenizer=BYTES), queue=queue)
    text = io.StringIO()
    chat = Conversation(ChatTemplate("plain"), BYTES)
    return Session(engine, BYTES, chat, sampling, "nowhere", Screen(text)), text


def answer_to(prompt: str, count: int = 6) -> str:
    return BYTES.decode(expected(BYTES.encode(prompt).tolist(), count, 257))


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_images_come_first_or_at_their_markers(tmp_path: Path) -> None:
    pixels = np.arange(8 * 8 * 3, dtype=np.uint8).reshape(8, 8, 3)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    device = StandIn(vocabulary=301, length=256, blocks=256, images=ImageInput(2, 3, 300, 8, 8))
    for prompt, tokens in (("abc", [300] * 3 + [*b"abc"]), ("a<image>b", [*b"a", *[300] * 3, *b"b"])):
        generator, _ = session(device=device)
        generator.answer(prompt, [tmp_path / "a.png"])
        row, _, _ = device.computed[-1]
        assert row.tokens[: row.prompt] == tokens
        np.testing.assert_array_equal(row.images[0].pixels, pixels)
    (tmp_path / "b.png").write_text("text")
    for files, prompt, message in (
        ([tmp_path / "b.png"], "a", "b.png: is neither"),
        ([tmp_path / "c.png"], "a", "c.png: cannot be read"),
        ([tmp_path / "a.png"], "<image><image>", "2 places of images for 1 images"),
    ):
        with pytest.raises(UserError, match=message):
            session(device=device)[0].answer(prompt, files)
    with user_error("--image"):
        session()[0].answer("a", [tmp_path / "a.png"])
    with user_error("--image", kind=ConfigError):
        main(["--run=x", "--chat", "--image=a.png"])


def test_several_answers_are_shown_one_after_another() -> None:
    generator, text = session(Sampling(max_tokens=3, n=2, seed=1, ignore_eos=True))
    generator.answer("abc")
    assert text.getvalue().startswith("[1] ") and "\n[2] " in text.getvalue()


def test_prompts_of_a_file_are_answered_in_order(tmp_path: Path) -> None:
    prompts = read_prompts(written(tmp_path / "p.txt", "first\n\nsecond\nthe third\n"))
    generator, text = session(queue=0)
    generator.answer_all(prompts, None)
    assert text.getvalue() == "".join(answer_to(prompt) + "\n" for prompt in ("first", "second", "the third"))


def test_an_interrupted_file_of_answers_is_completed(tmp_path: Path) -> None:
    prompts = [Prompt("", f"prompt {number}") for number in range(5)]
    out, sampling = tmp_path / "a.jsonl", Sampling(max_tokens=4, n=2, seed=3, ignore_eos=True, logprobs=1)
    session(sampling)[0].answer_all(prompts, out)
    complete_file = out.read_bytes()
    lines = [json.loads(line) for line in complete_file.splitlines()]
    assert [(line["index"], line["choice"]) for line in lines] == [(n, c) for n in range(5) for c in range(2)]
    assert {"text", "tokens", "finish", "logprobs", "top_logprobs"} < lines[0].keys()
    out.write_bytes(complete_file[: len(complete_file) // 2])
    device, progress = StandIn(vocabulary=257, length=256, blocks=256), []
    session(sampling, device)[0].answer_all(prompts, out, lambda completed, total: progress.append((completed, total)))
    assert out.read_bytes() == complete_file
    assert progress == [(number, 5) for number in range(3, 6)]
    with user_error("--output"):
        session(GREEDY)[0].answer_all(prompts, out)
    with user_error("--output"):
        session(sampling)[0].answer_all(prompts[:4], out)


@pytest.mark.parametrize("content", ['{"prompt": "a"}', "notes", '{"index": 0, "choice": 0}\n', '{"index": 1, "ch'])
def test_files_that_are_not_of_answers_are_left_alone(tmp_path: Path, content: str) -> None:
    """They may lack the end of a line, or have fewer lines than a prompt has answers."""
    out = written(tmp_path / "a.jsonl", content)
    with user_error("--output"):
        session(Sampling(max_tokens=4, n=3, seed=3))[0].answer_all([Prompt("", "a")], out)
    assert out.read_text() == content


def test_a_prompt_that_the_engine_refuses_is_named_before_anything_is_written(tmp_path: Path) -> None:
    prompts, out = [Prompt("p.txt, line 1", "a"), Prompt("p.txt, line 2", "a" * 300)], tmp_path / "a.jsonl"
    with user_error():
        session()[0].answer_all(prompts, out)
    assert not out.exists()


def test_a_byte_order_mark_is_not_part_of_a_prompt(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_bytes(b"\xef\xbb\xbffirst\r\n\r\nsecond\r\n")
    assert [prompt.content for prompt in read_prompts(tmp_path / "p.txt")] == ["first", "second"]


@pytest.mark.parametrize(
    "line",
    [
        "{",
        '{"prompt": "a", "prompt": "b"}',
        "[" * 100_000,
        "[]",
        '{"prompt": "a", "messages": []}',
        '{"prompt": [1, true]}',
        '{"prompt": []}',
        '{"prompt": "a", "temperature": 1}',
        '{"messages": [{"role": "robot", "content": "a"}]}',
        '{"messages": []}',
        '{"messages": [1, 2]}',
    ],
)
def test_lines_that_are_not_prompts_are_rejected(tmp_path: Path, line: str) -> None:
    path = written(tmp_path / "p.jsonl", f'{{"prompt": "fine"}}\n{line}\n')
    with user_error():
        read_prompts(path)


def test_kinds_of_prompts(tmp_path: Path) -> None:
    lines = ['{"prompt": "a"}', '{"prompt": [5, 6]}', '{"messages": [{"role": "user", "content": "hi"}]}']
    prompts = read_prompts(written(tmp_path / "p.jsonl", "\n".join(lines)))
    chat = Conversation(ChatTemplate("plain"), BYTES)
    ids = [encode(prompt, BYTES, chat) for prompt in prompts]
    assert ids == [(97,), (5, 6), tuple(b"user: hi\nassistant: ")]
    assert encode(Prompt("", ""), BYTES, None) == (BYTES.eod,)
    with user_error():
        encode(prompts[2], BYTES, None)


def test_a_conversation() -> None:
    generator, text = session()
    lines = iter(["hello", "/reset", "again", "/system be brief", "more", "/nothing", "/exit", "not read"])
    generator.chat(lambda output: next(lines), live=False)
    first = answer_to("user: hello\nassistant: ")
    second_turn = "user: again\nassistant: "
    second = answer_to(second_turn)
    third = answer_to(f"system: be brief\n{second_turn}{second}\nuser: more\nassistant: ")
    note = " (cut off: raise --max-tokens)\n"
    output = text.getvalue()
    assert output.startswith(
        f"{first}{note}(the conversation is forgotten)\n{second}{note}(the system message is set)\n"
    )
    assert f"{third}{note}(there is no /nothing" in output
    assert next(lines) == "not read"


def test_a_conversation_ends_with_the_lines_and_continues_after_a_line_that_is_too_long() -> None:
    generator, text = session(device=StandIn(vocabulary=257, length=64, blocks=64))

    def lines(output: str, inputs: list[str] = ["x" * 99, "ok"]) -> str:  # noqa: B006 read once
        if not inputs:
            raise EOFError
        return inputs.pop(0)

    generator.chat(lines, live=False)
    assert text.getvalue().startswith("(the prompt has ") and answer_to("user: ok\nassistant: ") in text.getvalue()


def test_control_c_stops_an_answer_between_steps() -> None:
    class Interrupted(StandIn):
        def start(self, work):
            if self.steps == 3:
                os.kill(os.getpid(), signal.SIGINT)
            return super().start(work)

    before = signal.getsignal(signal.SIGINT)
    generator, _ = session(device=Interrupted(vocabulary=257, length=256, blocks=256))
    (answer,) = generator.answers(
        (1, 2, 3), Sampling(max_tokens=99, temperature=0.0, ignore_eos=True), lambda piece: None
    )
    assert answer.finish == "cancelled" and 2 <= len(answer.tokens) < 8
    assert signal.getsignal(signal.SIGINT) is before
    (answer,) = generator.answers((1, 2, 3), GREEDY, lambda piece: None)
    assert list(answer.tokens) == expected([1, 2, 3], 6, 257)


def test_control_characters_at_a_terminal_are_escaped() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    plain, terminal = io.StringIO(), Terminal()
    for stream in (plain, terminal):
        Screen(stream).write("a\x1b[2Jb\n")
    assert (plain.getvalue(), terminal.getvalue()) == ("a\x1b[2Jb\n", "a\\x1b[2Jb\n")


def test_completions_are_limited_by_the_engine() -> None:
    engine = Engine(StandIn(rows=2), queue=1)
    answers = [
        [list(answer.tokens) for answer in prompt] for prompt in complete(engine, [((n,), GREEDY) for n in range(9)])
    ]
    assert answers == [[expected([n], 6)] for n in range(9)]


def test_template_settings_end_answers() -> None:
    stops = {name: Conversation(ChatTemplate(name), BYTES).stop_texts() for name in ("plain", "chatml", "identity")}
    assert stops == {"plain": ("\nuser: ",), "chatml": ("<|im_end|>", "<|im_end|>\n<|im_start|>user\n"), "identity": ()}


def test_flags_follow_from_the_settings() -> None:
    flags: tuple[Flag, ...] = sampling_flags()
    values = {flag.name.replace("-", "_"): flag.default for flag in flags}
    assert sampling_of(values) == Sampling(max_tokens=256)
    with user_error("--top-p", kind=ConfigError):
        sampling_of({**values, "top_p": 0.0})


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--prompt=a", "--chat"],
        ["--prompt=a"],
        ["--prompt=a", "--run=a", "--hf=b"],
        ["--prompt=a", "--output=b", "--run=a"],
        ["--prompt=a", "--run=a", "--logprobs=2"],
        ["--prompts=a", "--run=a", "--prompt-logprobs=0"],
        ["--chat", "--run=a", "--n=3"],
        ["--chat", "--run=a", "--best-of=2"],
        ["--prompt=a", "--run=a", "--temperature=-1", "--top-p=2"],
        ["--prompt=a", "--run=a", "--guide=none.json"],
        ["--prompt=a", "--run=a", "--max-tokns=3"],
    ],
)
def test_invalid_command_lines(arguments: list[str]) -> None:
    with user_error():
        main(arguments)
