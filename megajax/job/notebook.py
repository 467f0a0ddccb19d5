"""Runs for notebooks: `megajax.setup` returns one."""

from collections.abc import Sequence

import jax

from megajax.config.compose import check
from megajax.config.errors import UserError
from megajax.data.preprocessing.missing_token_files import demand_files
from megajax.inference.assembly import engine_of_run, engine_refusal
from megajax.inference.config import InferenceConfig, InferenceParallelConfig
from megajax.inference.engine import Engine
from megajax.inference.prompt_and_answer_files import Prompt, encode
from megajax.inference.sampling_settings import Sampling
from megajax.inference.worker import complete
from megajax.planning.resolve import resolve
from megajax.tokenizers.base import end_tokens_of
from megajax.training import session
from megajax.training.check_compiler_options import inference_options
from megajax.training.resolved import Resolved
from megajax.training.run_config import RunConfig


class Run(session.Run):
    """A run that also generates text.

    Example: `mj.setup(mj.load("quickstart.py"))`
    """

    _engine: Engine | None = None
    """The engine of all calls, which sleeps between them."""

    def engine(
        self, config: InferenceConfig, *, queue: int = 1024, parallel: InferenceParallelConfig | None = None
    ) -> Engine:
        """An engine on the devices of the run, with copies of its present weights.

        `engine.refit(run.state.inputs)` gives it those of later steps, without a file and without compiling. config:
        its compute dtype is the run's; queue: maximum number of waiting requests; parallel: another layout of the
        engine on the run's devices, such as `mj.InferenceParallelConfig(tensor=2)` beside data_sharding=fsdp; None: the
        run's mesh.

        Raises UserError for a model or a mesh without an engine: several processes, or parallel.pipeline, expert or
        context above 1.

        Example: `engine = run.engine(mj.InferenceConfig(rows=32))`
        """
        if (why := engine_refusal(self.cfg.model, self.mesh)) is not None:
            raise UserError(f"no engine for this run: {why}")
        return engine_of_run(
            self.cfg,
            self.state.inputs,
            self.mesh,
            inference_options(self.cfg.xla, self.mesh.devices.flat[0]),
            self.parts.tokenizer,
            config,
            end_tokens=end_tokens_of(self.parts.tokenizer),
            length=config.length or self.cfg.model.row_positions(),
            queue=queue,
            parallel=None if parallel is None else parallel.layout(),
        )

    def generate(
        self,
        prompt: str,
        *,
        max_tokens: int = 256,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int | None = None,
        stop: Sequence[str] = (),
    ) -> str:
        """The continuation of a prompt by the current weights, without the prompt.

        The settings are those of `megajax.inference.sampling_settings.Sampling`; temperature=0 always takes the
        likeliest token.
        Prompt and answer together have at most as many tokens as a row of the run.

        Raises UserError for an invalid setting, a prompt that is too long, and a model or mesh without an engine:
        several processes, or parallel.pipeline, expert or context above 1.
        """
        sampling = Sampling(
            max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, stop=tuple(stop)
        )
        if self._engine is None:
            self._engine = self.engine(InferenceConfig(rows=1), queue=1)
        else:
            self._engine.refit(self.state.inputs)
            self._engine.wake()
        try:
            ((answer,),) = complete(
                self._engine, [(encode(Prompt("prompt", prompt), self.parts.tokenizer, None), sampling)]
            )
        finally:
            # Steps of training need the memory of the weights and the cache.
            self._engine.sleep(level=2, running="abort")
        return answer.text


def setup(cfg: RunConfig, *, devices: list[jax.Device] | None = None) -> Run:
    """A run with fresh weights, on all devices or on those given; writes only data caches.

    Raises ConfigError for settings that don't fit together or the devices, UserError for data or a tokenizer that
    can't be loaded, and for a checkpoint to start from.

    Example: `mj.setup(mj.load("quickstart.py", "parallel.tensor=2"))`
    """
    if isinstance(cfg, RunConfig) and (source := cfg.checkpoint.load or cfg.checkpoint.weights):
        raise UserError(
            f"setup starts with fresh weights and would not read {source}: train from it with python -m megajax.train, "
            "or leave checkpoint.load and checkpoint.weights out"
        )
    run = set_up(cfg, devices=devices)
    return Run(run.parts, run.state, run.batches, run.reference)


def set_up(
    cfg: RunConfig, *, devices: list[jax.Device] | None = None, start: session.Start | None = None
) -> session.Run:
    """A run with fresh weights or the state of `start`; see `setup`."""
    if not isinstance(cfg, RunConfig):
        raise UserError(f'setup takes a RunConfig, not {type(cfg).__name__}: setup(load("gpt3.py:debug"))')
    return session.begin(_checked(cfg, devices), start)


def prepare(cfg: RunConfig, devices: list[jax.Device] | None = None) -> session.Parts:
    """The parts of a run without weights; see `setup`."""
    return session.parts_of(_checked(cfg, devices))


def _checked(cfg: RunConfig, devices: list[jax.Device] | None) -> Resolved:
    check(cfg)
    demand_files(cfg.data, cfg.tokenizer)
    return resolve(cfg, devices)
