"""Settings and limits of the server; importing this imports neither jax nor flax."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Literal

from megajax.config.bounds import Bounds, Count
from megajax.config.errors import ConfigError, Problem, UserError
from megajax.inference.config import GenerationConfig
from megajax.inference.sampling_settings import GuideLimits

type Seconds = Annotated[float, Bounds(above=0, below=1_000_000)]
type Port = Annotated[int, Bounds(at_least=0, at_most=65535)]


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Limits of the server.

    Example: `mj.ServerConfig(name="mine", queue=64)`
    """

    name: str | None = None
    """Name of the model in requests and answers. None: the name of its folder."""
    strict: bool = False
    """Refuse requests with unknown fields. False: ignore such fields, with a warning in the log for each name."""
    generation_config: bool = True
    """With --hf, take the defaults of temperature, top_p, top_k, min_p and repetition_penalty from the folder's
    generation_config.json. False: OpenAI's defaults."""
    tool_format: Literal["hermes", "llama3", "mistral", "deepseek", "harmony", "glm", "qwen_coder"] | None = None
    """How the model writes calls of tools: hermes (also Qwen): <tool_call>{JSON}</tool_call>; llama3: {JSON}, perhaps
    after <|python_tag|>; mistral: after [TOOL_CALLS]; deepseek: V3 and V3.1; harmony: the channels of gpt-oss; glm:
    GLM-4.5 to 4.7; qwen_coder: also Qwen3.5. None: found in the chat template."""
    reasoning: bool = False
    """Split the text between <think> and </think> at the start of chat answers off into `reasoning_content`."""
    pooling: Literal["first", "last", "mean"] | None = None
    """What /v1/embeddings answers: the state of the first or last token of a text, or the mean over its tokens. None:
    that of a sentence-transformers folder, else mean for encoders such as BERT, and last for decoders."""
    image_pixels: Count = 2**24
    """Maximum number of pixels of an image in a request."""
    load_adapters: bool = False
    """Routes that load an adapter from any folder that the server can read, and drop it: /v1/load_lora_adapter and
    /v1/unload_lora_adapter. For trusted clients only."""
    control: bool = False
    """Routes that pause the engine, let it sleep, abort all requests, and read other weights from any folder that the
    server can read: /pause, /resume, /sleep, /wake_up, /abort_request, /update_weights_from_disk. For trusted clients
    only."""
    cache_per_key: bool = False
    """Share cached prompts only between requests with the same key, so that the time of an answer says nothing about
    prompts of other keys. Needs --api-key-file."""
    queue: Count = 128
    """Maximum number of waiting requests; further ones get status 429. Each prompt of a call counts."""
    prompts: Count = 128
    """Maximum number of answers of a call: prompts x n, or prompts x best_of."""
    body_bytes: Annotated[int, Bounds(at_least=1024)] = 2 * 2**20
    """Maximum number of bytes of a body."""
    header_bytes: Annotated[int, Bounds(at_least=1024)] = 16 * 2**10
    """Maximum number of bytes of the first line and the headers of a request."""
    guide_seconds: Seconds = 1.0
    """Processor time limit to compile the guide of a request (a JSON schema, regex or grammar, or tools)."""
    guide_bytes: Annotated[int, Bounds(at_least=2**20)] = 64 * 2**20
    """Maximum memory of a compiled guide."""
    guide_cache_bytes: int = 512 * 2**20
    """Maximum memory of all guides together, as estimated: those of running requests, and recently used ones. Without
    room for another one, a request gets status 429."""
    guide_queue: Count = 128
    """Maximum number of different guides that wait to be compiled; requests with further ones get status 429."""
    guide_step_seconds: Seconds = 0.005
    """Mean processor time of a guide for each token, beyond which its answer ends with status 400."""
    connections: Count = 512
    """Maximum number of simultaneous connections; further ones are closed."""
    header_seconds: Seconds = 10.0
    """Time limit for the headers of a request, and for a connection without a request."""
    body_seconds: Seconds = 30.0
    """Time limit for a body."""
    write_seconds: Seconds = 60.0
    """Time limit for a client to read sent data, after which its request is cancelled."""
    stall_seconds: Seconds = 60.0
    """Time without a step, while requests run, after which /health answers 503; and time that other processes of the
    server have to run their part of a step, once process 0 has run its own, before the server ends."""
    hosts: tuple[str, ...] = ()
    """Host names by which clients reach the server, beside localhost, IP addresses and --host. Other names in the Host
    header get status 403, so that no web page can reach the server by DNS rebinding. A server with keys allows all
    names if none is given here."""
    drain_seconds: Seconds = 60.0
    """Time limit for running requests after SIGTERM; the remaining ones end with status 503."""

    def problems(self) -> list[Problem]:
        problems = []
        if self.guide_cache_bytes < self.guide_bytes:
            message = f"must be at least guide_bytes={self.guide_bytes}, got {self.guide_cache_bytes}"
            problems.append(Problem("guide_cache_bytes", message))
        if invalid_hosts := [name for name in self.hosts if host_of(name) != name]:
            problems.append(Problem("hosts", f"{invalid_hosts[0]!r} is not a host name in lower case without a port"))
        return problems

    def guide_limits(self) -> GuideLimits:
        """Those of the guides of requests."""
        size, every = self.guide_bytes, self.guide_cache_bytes
        return GuideLimits(self.guide_seconds, size, every, self.guide_queue, self.guide_step_seconds)


@dataclass(frozen=True, kw_only=True)
class ServingConfig(GenerationConfig):
    """Everything that `serve` depends on, except the weights and the address.

    Example: `mj.ServingConfig(model=mj.gpt2("124m"), server=mj.ServerConfig(queue=64))`
    """

    server: ServerConfig = field(default_factory=ServerConfig)
    """Limits of the server."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Access:
    """Access to the server, and its log."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: Port = 5000
    """Port; 0: any free port."""
    api_key_file: Path | None = None
    """File with a key in each line. All routes except /health require one of them."""
    insecure: bool = False
    """Listen on any address without keys."""
    log_prompts: bool = False
    """Log prompts and answers as well."""

    def problems(self) -> list[Problem]:
        problems = []
        if not (self.api_key_file or self.insecure or is_loopback(self.host)):
            message = f"{self.host} can be reached from other machines, but there is no --api-key-file"
            problems.append(Problem("--host", message, "give one, or --insecure for a server that is open to all"))
        if self.api_key_file and self.insecure:
            problems.append(Problem("--insecure", "disables keys, but --api-key-file is given", "remove one of them"))
        return problems

    def keys(self) -> tuple[bytes, ...]:
        """The keys of `api_key_file`; empty without a file.

        Raises:
            UserError: the file cannot be read, has no key, or has a key of less than 16 characters.
        """
        if self.api_key_file is None:
            return ()
        try:
            lines = self.api_key_file.read_bytes().splitlines()
        except OSError as error:
            raise UserError(f"--api-key-file={self.api_key_file}: cannot be read: {error.strerror}") from error
        keys = tuple(line.strip() for line in lines if line.strip())
        if not keys:
            raise UserError(f"--api-key-file={self.api_key_file}: the file is empty: write a key into it")
        if short := [key for key in keys if len(key) < 16]:
            message = f"a key has {len(short[0])} characters, fewer than 16"
            raise UserError(f"--api-key-file={self.api_key_file}: {message}: `openssl rand -hex 32` makes a good one")
        return keys


def named_folders(flag: Sequence[str]) -> dict[str, Path]:
    """The folders of --adapters, by name. Raises ConfigError."""
    folders = {}
    for text in flag:
        name, _, folder = text.partition("=")
        if not (name and folder) or name in folders:
            problem = "a name twice" if name in folders else f"{text!r}"
            raise ConfigError([Problem("--adapters", f"has {problem}", "give NAME=DIR,NAME=DIR")], "command line")
        folders[name] = Path(folder).expanduser()
    return folders


def with_slots(config: ServingConfig, adapters: int) -> ServingConfig:
    """The settings with a slot for each adapter of the command line. Raises ConfigError for a server that could load
    adapters but has no slots."""
    slots = max(config.inference.adapters, adapters)
    if config.server.load_adapters and not slots:
        problem = Problem("server.load_adapters", "needs slots for adapters", "set inference.adapters=4, for example")
        raise ConfigError([problem], "command line")
    return replace(config, inference=replace(config.inference, adapters=slots))


def host_of(header: str) -> str:
    """The host name or IP address of a Host header, without its port."""
    name = header.strip().lower()
    return name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0].rstrip(".")


def is_ip_address(host: str) -> bool:
    """Whether a host is an IP address. DNS rebinding needs a name."""
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address. Names other than localhost may resolve to anything."""
    return ip_address(host).is_loopback if is_ip_address(host) else host == "localhost"
