"""Two processes with caches of their own: process 0 asks the store about files, once, and the other learns it."""

import subprocess
import sys
from pathlib import Path

import gangs
import numpy as np
import pytest
import token_files
from object_stores import ENDPOINT, SERVERS, FaultyProxy, environment, free_port
from test_streams import TEXTS, write

from megajax.storage import stores

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).with_name("stored_data_processes.py")


def run(variables: dict[str, str], caches: list[Path], *urls: str) -> list[list[str]]:
    """The lines of each process."""
    port = str(free_port()) if len(caches) > 1 else "none"
    processes = [
        subprocess.Popen(
            [sys.executable, SCRIPT, str(index), port, *urls], text=True, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, env=environment(variables | {"XDG_CACHE_HOME": str(cache)}),
        )
        for index, cache in enumerate(caches)
    ]  # fmt: skip
    results = [process.communicate(timeout=300) for process in processes]
    assert all(process.returncode == 0 for process in processes), results
    lines = [output.splitlines() for output, _ in results]
    return [[line for line in part if line.startswith(("rows", "error"))] for part in lines]  # gloo writes others


@pytest.mark.parametrize("kind", SERVERS)
def test_process_0_alone_reads_what_all_need(kind: str, tmp_path: Path, monkeypatch) -> None:
    with SERVERS[kind]() as variables:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        stores._objects.cache_clear()
        store = stores.open_store(f"{kind}://bucket/data")
        token_files.write(tmp_path / "text", np.arange(20000).reshape(400, 50))
        for suffix in (".bin", ".idx"):
            store.write(f"text{suffix}", (tmp_path / f"text{suffix}").read_bytes())
        for number in range(2):
            write(tmp_path / f"{number}.parquet", TEXTS[number::2])
            store.write(f"web/{number}.parquet", (tmp_path / f"{number}.parquet").read_bytes())
        urls = (f"{kind}://bucket/data/text", f"{kind}://bucket/data/web/*.parquet", f"{kind}://bucket/data/none")
        proxy = FaultyProxy(variables[ENDPOINT[kind]])
        variables |= {ENDPOINT[kind]: proxy.url}
        caches = [tmp_path / "cache-0", tmp_path / "cache-1"]
        try:
            (alone,) = run(variables, [tmp_path / "cache"], *urls)
            proxy.log.clear()
            first, second = run(variables, caches, *urls)
            index = [entry for entry in proxy.log if "text.idx" in entry[1]]
            proxy.log.clear()
            assert run(variables, caches, *urls)[1] == second
            again = [entry for entry in proxy.log if "text.idx" in entry[1]]
            (caches[0] / "only").mkdir(parents=True, exist_ok=True)
            write(caches[0] / "only" / "a.parquet", TEXTS)
            lacking = run(variables, caches, f"CACHE/only/*.parquet,{urls[1]}", urls[1])
            (tmp_path / "file").touch()
            broken = run(variables, [caches[0], tmp_path / "file"], urls[0])
        finally:
            proxy.close()
            stores._objects.cache_clear()
    assert first[:2] == second[:2] == alone[:2] and all(line.startswith("rows") for line in alone[:2])
    assert alone[2].startswith(f"error {urls[2]}.idx: no such object")
    assert first[2] == second[2] == alone[2].replace("error ", "error process 0: ")
    size = (tmp_path / "text.idx").stat().st_size
    read = [tuple(map(int, bounds.removeprefix("bytes=").split("-"))) for _, _, bounds in index]
    whole = [bounds for bounds in read if bounds[-1] - bounds[0] + 1 == size]
    others = [bounds[-1] - bounds[0] + 1 for bounds in read if bounds not in whole]
    # S3 says the size of an object; in the other store, the end of it is looked for.
    assert len(whole) == 1 and (max(others) == 1 or (kind == "gs" and sum(others) < size)), read
    assert len(again) == 1, again  # its generation
    assert lacking[0] == lacking[1] and "process 1: data: no files match" in lacking[0][0], lacking
    assert lacking[0][1] == alone[1], "the processes go on together"
    assert broken[0] == broken[1] and "Not a directory" in broken[0][0], broken


def test_a_run_goes_on_where_the_same_data_is(tmp_path: Path, monkeypatch) -> None:
    """It goes from a disk to a store and back without checkpoint.changed_data. Other tokens are refused."""
    with SERVERS["s3"]() as variables, gangs.started(tmp_path) as start:
        for name, value in (variables | {"XDG_CACHE_HOME": str(tmp_path / "cache")}).items():
            monkeypatch.setenv(name, value)
        stores._objects.cache_clear()
        store, draw = stores.open_store("s3://bucket/moved"), np.random.default_rng(0)
        token_files.write(tmp_path / "text", draw.integers(0, 60, (400, 300)))
        for suffix in (".bin", ".idx"):
            store.write(f"text{suffix}", (tmp_path / f"text{suffix}").read_bytes())
        data = [f"--config={gangs.CONFIG}", "--devices=cpu:1", "--data.type=BlendConfig", "--data.split=90,10,0"]
        data.append("--resilience.exit_after_steps=2")

        def train(place: str) -> tuple[int, str]:
            gang = start(*gangs.TRAIN, *data, f"--data.paths={place}/text", f"--run_dir={tmp_path}/run")
            return gang.wait(300), gang.text

        assert train(str(tmp_path))[0] == 0
        code, text = train("s3://bucket/moved")
        assert code == 0, text
        changed = bytearray((tmp_path / "text.bin").read_bytes())
        changed[1000] ^= 1
        store.write("text.bin", bytes(changed))
        code, text = train("s3://bucket/moved")
        assert code == 2 and "s3://bucket/moved/text.bin: checksum of a sample of its content" in text, text
        assert train(str(tmp_path))[0] == 0
        assert max(gangs.losses(tmp_path / "run")) == 6
    stores._objects.cache_clear()
