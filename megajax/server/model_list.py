"""The names that a request may give as `model`: the model of the server, and each adapter that is loaded."""

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megajax.config.errors import UserError
from megajax.inference.request import RefusedRequest
from megajax.inference.sampling_settings import abbreviated
from megajax.server.body import RequestError, invalid, refused
from megajax.server.fields import STRING, TEXT
from megajax.server.models import ServedModel
from megajax.server.request_values import Field, Fields, Unsupported, instance

UNLOAD_ADAPTER: Fields = {
    "lora_name": STRING._replace(required=True),
    "lora_int_id": Field("an integer", instance(int)),
}
"""Fields of /v1/unload_lora_adapter, by vLLM's names; numbers of adapters have no effect."""
LOAD_ADAPTER: Fields = {
    **UNLOAD_ADAPTER,
    "lora_path": TEXT._replace(required=True),
    "base_model_name": STRING,
    "load_inplace": Unsupported("unload the adapter first", (False,)),
}
"""Fields of /v1/load_lora_adapter."""


class ModelList:
    """The model of a server and its adapters. Methods run on the event loop's thread, `add` also before it starts."""

    def __init__(
        self,
        base: ServedModel,
        read_adapter: Callable[[Path], Any] | None = None,
        read_weights: Callable[[Path], Callable[[], Any]] | None = None,
    ):
        """read_adapter: a folder -> the values of `Engine.load_adapter`; raises UserError. None: there are no slots.

        read_weights: a folder -> a function for `Engine.refit`; raises UserError. None: the weights stay.
        """
        self.base, self._read, self._read_weights = base, read_adapter, read_weights
        self._adapters: dict[str, ServedModel] = {}
        self._loading = asyncio.Lock()

    def named(self, values: Mapping[str, Any]) -> ServedModel:
        """The model of the field `model`, by default the base. Raises RequestError 404 for an unknown name."""
        models = {self.base.name: self.base, **self._adapters}
        if (name := values.get("model", self.base.name)) not in models:
            names = f"there is {self.base.name}" if len(models) == 1 else f"there are {', '.join(models)}"
            raise RequestError(404, f"no model {abbreviated(name)}: {names}", "model")
        return models[name]

    def cards(self) -> list[dict[str, Any]]:
        """The entries of /v1/models."""
        return [model.card() for model in (self.base, *self._adapters.values())]

    def read(self, name: str, folder: Path) -> Any:
        """The values of an adapter. Raises UserError for a name in use, or a folder that does not fit the model."""
        if name in (self.base.name, *self._adapters):
            raise UserError(f"the name {name!r} is in use: choose another one")
        if self._read is None:
            raise UserError("the server has no slots for adapters: set inference.adapters")
        if not folder.is_dir():
            raise UserError(f"{folder} is not a folder: give a PEFT folder, or a run with model.lora")
        return self._read(folder)

    def read_weights(self, folder: Path) -> Callable[[], Any]:
        """A function for `Engine.refit`. Raises UserError for a folder that does not fit the model, and if the engine's
        weights cannot be replaced."""
        if self._read_weights is None:
            raise UserError("the server cannot read other weights: set server.control")
        # Before anything is read: processes read checkpoints together, and the others would not take part.
        self.base.worker.engine.movable_weights()
        if not folder.is_dir():
            raise UserError(f"{folder} is not a folder: give a run, a step of one, or a Hugging Face folder")
        return self._read_weights(folder)

    def add(self, name: str) -> ServedModel:
        """List an adapter that the engine has loaded."""
        self._adapters[name] = self.base.with_adapter(name)
        return self._adapters[name]

    async def load(self, values: Mapping[str, Any]) -> ServedModel:
        """Load the adapter of a request with `LOAD_ADAPTER`. Raises RequestError and UserError."""
        name, folder = values["lora_name"], Path(values["lora_path"])
        if not name or len(name) > 200 or not name.isprintable():
            raise invalid("lora_name", "lora_name must have 1 to 200 printable characters")
        async with self._loading:
            try:
                adapter = await asyncio.to_thread(self.read, name, folder)
            except OSError as error:
                raise invalid(
                    "lora_path", f"lora_path cannot be read: {abbreviated(str(folder))}: {error.strerror}"
                ) from None
            await self._on_engine(lambda engine: engine.load_adapter(name, adapter))
            return self.add(name)

    async def unload(self, values: Mapping[str, Any]) -> None:
        """Drop the adapter of a request with `UNLOAD_ADAPTER`; its unfinished requests go on. Raises RequestError."""
        name = values["lora_name"]
        async with self._loading:
            if self._adapters.pop(name, None) is None:
                raise RequestError(404, f"no adapter {abbreviated(name)} is loaded", "lora_name")
            await self._on_engine(lambda engine: engine.drop_adapter(name))

    async def _on_engine(self, work: Callable[[Any], None]) -> None:
        try:
            await asyncio.wrap_future(self.base.worker.call(work))
        except RefusedRequest as refusal:
            raise refused(refusal, {}) from None
