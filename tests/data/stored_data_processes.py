"""Run by test_stored_data_in_processes.py in each of two processes: reads rows of data in a store.

Arguments: process, port, URLs. A mixture has commas between its URLs; CACHE is the process's own folder. For each URL
it prints `rows CHECKSUM`, or `error MESSAGE`.
"""

import os
import sys
import zlib

import jax

from megajax.config.errors import UserError
from megajax.data.configs import StreamConfig
from megajax.data.rows.splits import Rows
from megajax.data.text.config import BlendConfig
from megajax.models.decoder.config import text_schema
from megajax.processes import reading_once
from megajax.tokenizers.config import ByteTokenizerConfig, NullTokenizerConfig


def rows(url: str) -> int:
    if "*" in url:
        paths = tuple(url.replace("CACHE", os.environ["XDG_CACHE_HOME"]).split(","))
        data, tokenizer = StreamConfig(paths=paths, lanes=4), ByteTokenizerConfig().build()
    else:
        data, tokenizer = BlendConfig(paths=(url,), split="1,0,0"), NullTokenizerConfig(vocabulary_size=70000).build()
    splits = data.build(tokenizer=tokenizer, schema=text_schema(32, 2**31), rows=Rows(50), seed=1)
    return zlib.crc32(b"".join(splits.train[row]["tokens"].tobytes() for row in range(50)))


def main() -> None:
    index, port, *urls = sys.argv[1:]
    if port != "none":
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        address = f"127.0.0.1:{port}"
        jax.distributed.initialize(address, 2, int(index), coordinator_bind_address=address)
    reading_once.PART = 1000
    for url in urls:
        try:
            print("rows", rows(url), flush=True)
        except UserError as error:
            print("error", error, flush=True)


if __name__ == "__main__":
    main()
