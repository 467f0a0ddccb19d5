"""Streams, conversations, tokenizers and model folders in object stores; sizes, samples, secrets and faults."""

import gzip
import json
import os
from pathlib import Path

import numpy as np
import pytest
from object_stores import faulty, serving
from test_streams import TEXTS, rows_of, write
from user_errors import user_error

from megajax.config.errors import UserError
from megajax.data.chat.tokenized_conversations import _lines
from megajax.data.checksum import full_checksums, group_files, sample_checksums
from megajax.data.preprocessing.preprocessing import preprocess
from megajax.data.preprocessing.text_files import find_files, open_text
from megajax.interop.weights.formats import local_name
from megajax.storage import local_copies, ranged_files, stores
from megajax.storage.local_copies import local_file, local_folder
from megajax.storage.ranged_files import BlockCache
from megajax.storage.retried_reads import ChangedFile
from megajax.storage.stores import open_store
from megajax.tasks.evaluate_command import parse_tasks
from megajax.tasks.read_jsonl import read_lines
from tests.data.text_jobs import content, job

pytest.importorskip("moto")


@pytest.fixture(scope="module", params=["s3", pytest.param("gs", marks=pytest.mark.slow)])
def bucket(request, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch, serving(request.param, tmp_path_factory.mktemp("cache")) as url:
        patch.setattr(ranged_files, "BLOCK", 300)
        patch.setattr(local_copies, "PART", 1000)
        patch.setattr(stores, "NEAR", 64)
        yield url


def put(path: Path, url: str) -> None:
    store = open_store(url.rpartition("/")[0])
    store.write(url.rpartition("/")[2], path.read_bytes())


RARE = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("arrow", "tar", "jsonl", "jsonl.zst")]


@pytest.mark.parametrize("kind", ["parquet", "array_record", "jsonl.gz", *RARE])
def test_a_stream_has_the_rows_of_the_disk(bucket: str, kind: str, tmp_path: Path) -> None:
    for number in range(2):
        file = tmp_path / f"{number}.{kind}"
        write(tmp_path / f"{number}.jsonl" if kind.startswith("jsonl") else file, TEXTS[number::2])
        if kind == "jsonl.gz":
            file.write_bytes(gzip.compress((tmp_path / f"{number}.jsonl").read_bytes()))
        elif kind == "jsonl.zst":
            zstandard = pytest.importorskip("zstandard")
            file.write_bytes(zstandard.compress((tmp_path / f"{number}.jsonl").read_bytes()))
        put(file, f"{bucket}/{kind.replace('.', '-')}/web/{number}.{kind}")
    url = f"{bucket}/{kind.replace('.', '-')}/**/[01].{kind}"
    local = rows_of(tmp_path / f"*.{kind}", cache=tmp_path / "local")
    stored = rows_of(url, cache=tmp_path / "stored")
    for row in (0, 1, 2, 3, 130, 77):
        np.testing.assert_array_equal(stored[row]["tokens"], local[row]["tokens"])
    resumed = rows_of(url, cache=tmp_path / "stored")
    np.testing.assert_array_equal(resumed[130]["labels"], local[130]["labels"])
    assert resumed.files() == [url.replace("**/[01]", f"web/{number}") for number in range(2)]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_preprocessing_reads_objects_as_files(bucket: str, kind: str, tmp_path: Path) -> None:
    for number in range(2):
        write(tmp_path / f"{number}.{kind}", TEXTS[number::2])
        put(tmp_path / f"{number}.{kind}", f"{bucket}/texts-{kind}/{number}.{kind}")
    (tmp_path / "ignored").write_text("no suffix")
    put(tmp_path / "ignored", f"{bucket}/texts-{kind}/ignored")
    local = preprocess(job(tmp_path, tmp_path / f"0.{kind}", tmp_path / f"1.{kind}", prefix=str(tmp_path / "local")))
    for number, place in enumerate(("", "/*.*", f"/[01].{kind}")):
        prefix = str(tmp_path / f"stored{number}")
        stored = preprocess(job(tmp_path, f"{bucket}/texts-{kind}{place}", prefix=prefix, partitions=1 + number))
        assert content(stored.prefixes[0]) == content(local.prefixes[0])


def test_preprocessing_of_objects_that_are_missing_or_replaced(bucket: str, tmp_path: Path) -> None:
    with user_error("--input"):
        find_files([f"{bucket}/none.jsonl"])
    write(tmp_path / "a.jsonl", TEXTS)
    put(tmp_path / "a.jsonl", f"{bucket}/replaced/a.jsonl")
    (file,) = find_files([f"{bucket}/replaced/a.jsonl"])
    write(tmp_path / "a.jsonl", TEXTS[::-1])
    put(tmp_path / "a.jsonl", f"{bucket}/replaced/a.jsonl")
    with (
        user_error(kind=ChangedFile),
        open_text(file.path, file.generation) as (text, _),
    ):
        text.read()


def test_tasks_read_objects(bucket: str, tmp_path: Path) -> None:
    (tmp_path / "questions.jsonl").write_text('{"text": "a b"}\n')
    put(tmp_path / "questions.jsonl", f"{bucket}/tasks/questions.jsonl")
    (task,) = parse_tasks(f"lambada:{bucket}/tasks/questions.jsonl:strict=true")
    assert task.strict and [*read_lines(task.path, {"text": str})] == [(1, {"text": "a b"})]


def test_streams_that_are_missing_replaced_or_too_large(bucket: str, tmp_path: Path) -> None:
    open_store(bucket).write("nothing/", "a folder, as consoles make them")
    with user_error("data"):
        rows_of(f"{bucket}/nothing/*", cache=tmp_path)
    write(tmp_path / "a.parquet", TEXTS)
    put(tmp_path / "a.parquet", f"{bucket}/changing/a.parquet")
    rows = rows_of(f"{bucket}/changing/*.parquet", cache=tmp_path / "cache")
    write(tmp_path / "a.parquet", TEXTS[::-1])
    put(tmp_path / "a.parquet", f"{bucket}/changing/a.parquet")
    for block in (tmp_path / "cache").glob("blocks/*/0000????"):
        block.unlink()
    with user_error(kind=ChangedFile):
        rows[0]
    write(tmp_path / "a.arrow", TEXTS)
    put(tmp_path / "a.arrow", f"{bucket}/large/a.arrow")
    with user_error():
        rows_of(f"{bucket}/large/*.arrow", cache=tmp_path / "small", cache_gib=1e-6)


def test_sizes_are_found(bucket: str) -> None:
    store = open_store(f"{bucket}/sizes")
    for size in (1, 2, 63, 64, 65, 4097, *([] if bucket.startswith("gs") else [0])):  # gs's emulator takes none of 0.
        store.write("object", bytes(size))
        assert store.size("object") == size
    with pytest.raises(FileNotFoundError):
        store.size("other")


def test_samples_of_objects_are_those_of_files(bucket: str, tmp_path: Path) -> None:
    content = np.random.default_rng(0).bytes(5_000_000)
    (tmp_path / "text.bin").write_bytes(content)
    put(tmp_path / "text.bin", f"{bucket}/samples/text.bin")
    groups = [group_files([str(path)]) for path in (tmp_path / "text.bin", f"{bucket}/samples/text.bin")]
    local, stored = (sample_checksums(group)[0] for group in groups)
    assert stored.difference(local) is None and local.path != stored.path
    assert full_checksums(groups[0]) == full_checksums(groups[1])
    open_store(f"{bucket}/samples").write("text.bin", b"x" + content[1:])
    assert "checksum of a sample" in (sample_checksums(groups[1])[0].difference(local) or "")
    many = [str(tmp_path / "text.bin"), *[f"{bucket}/samples/{number}" for number in range(2000)]]
    assert group_files(many)[0].path == ""


def test_small_files_and_model_folders_are_copied_once(bucket: str, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": []}) + "\n")
    url = f"{bucket}/small/chats.jsonl"
    put(tmp_path / "chats.jsonl", url)
    assert [line for _, line in _lines(url)] == [(tmp_path / "chats.jsonl").read_bytes()]
    with user_error():
        local_file(bucket)
    with user_error():
        local_file(f"{bucket}/small/none.jsonl")
    store = open_store(f"{bucket}/model")
    content = np.random.default_rng(0).bytes(5000)
    for name in ("model.safetensors", "config.json", "pytorch_model.bin", "onnx/config.json"):
        store.write(name, content)
    folder = local_folder(f"{bucket}/model")
    assert sorted(path.name for path in folder.iterdir() if path.name[0] != ".") == ["config.json", "model.safetensors"]
    assert (folder / "model.safetensors").read_bytes() == content and local_name(f"hf:{bucket}/model") == f"hf:{folder}"
    read = []
    monkeypatch.setattr(stores.Store, "size", lambda self, name: read.append(name))
    assert local_folder(Path(f"{bucket}/model")) == folder and not read  # also without the slash that Path eats
    with user_error():
        local_folder(f"{bucket}/nothing")


def test_a_cache_that_cannot_be_written_is_one_message(bucket: str, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "a.jsonl").write_text("{}\n")
    put(tmp_path / "a.jsonl", f"{bucket}/full/a.jsonl")
    (tmp_path / "file").touch()
    store = open_store(f"{bucket}/full")
    with user_error():
        local_copies.local_copy(store, "a.jsonl", BlockCache(tmp_path / "file"))

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, user_error():
        patch.setattr(os, "pwrite", full)
        local_copies.local_copy(store, "a.jsonl", BlockCache(tmp_path / "blocks"))
    assert local_copies.local_copy(store, "a.jsonl", BlockCache(tmp_path / "blocks")).read_text() == "{}\n"
    assert not list(tmp_path.glob("blocks/*/.*.copying"))


def test_messages_have_no_credentials(tmp_path: Path, monkeypatch) -> None:
    """The server echoes them here: from the environment, from a profile, and of a machine's role."""
    profile = "[default]\naws_access_key_id = PROFILEKEY\naws_secret_access_key=profile/s+c\n"
    (tmp_path / "credentials").write_text(profile)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "of-the-environment")
    tokens = "FwoGZXIvYXdzE" * 8, "ya29." + "a" * 80
    secrets = ("PROFILEKEY", "profile/s+c", "of-the-environment", "ASIAROLEROLEROLEROLE", *tokens)
    answer = f"PERMISSION_DENIED: InvalidToken: you sent {' and '.join(secrets)} for object a/b.bin"
    message = stores._message("s3://bucket/a", "read", ValueError(answer))
    assert not any(secret in message for secret in secrets) and "InvalidToken: you sent *** and" in message
    assert "Check the credentials" in message
    assert "Set the clock" in stores._message("s3://b/a", "read", ValueError("RequestTimeTooSkewed: The difference"))


@pytest.mark.slow
def test_denied_and_failing_stores_are_one_line(bucket: str) -> None:
    with faulty(bucket, 2) as proxy:
        for fault, advice in (("denied", "Check the credentials"), ("503", "Check the network and the store")):
            proxy.inject(fault, 1000)
            for read in (local_folder, local_file):
                with pytest.raises(UserError, match=advice) as raised:
                    read(f"{bucket}/model/config.json")
                assert "\n" not in str(raised.value) and "AKIATESTKEY" not in str(raised.value)
