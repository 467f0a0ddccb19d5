"""Loads the draft model of an engine from a run or a Hugging Face folder."""

import sys
from math import prod

import jax

from megajax.config.errors import UserError
from megajax.display.text import count
from megajax.inference.config import GenerationConfig
from megajax.inference.loaded_model import Draft, LoadedModel
from megajax.inference.loading import load_weights
from megajax.inference.sampling.guide import token_pieces
from megajax.interop.loading import Loaded, quantized_weights
from megajax.interop.origin import Origin, generation_config
from megajax.mesh.rules import Plan
from megajax.models.protocol import ids_below
from megajax.precision.config import PrecisionConfig
from megajax.tokenizers.base import Tokenizer
from megajax.training.session import build_tokenizer


def load_draft(loaded: Loaded, origin: Origin) -> Draft:
    """The draft model of an origin for a loaded model, on its mesh, in its compute dtype.

    It is sharded over `tensor` like the model where its sizes allow, else each device has all of it. Raises UserError
    for a draft model that does not fit the model: other tokens, a shorter maximum length, a state per request.
    """
    settings, model = generation_config(origin, GenerationConfig).base, loaded.model
    drafting, where, parallel = settings.model, str(origin.hf or origin.run), loaded.config.parallel.layout()
    if drafting.memory_length():
        raise UserError(
            f"the draft model {where} is {type(drafting).__name__}, an encoder-decoder model: use a decoder"
        )
    vocabulary = ids_below(drafting)
    tokenizer = build_tokenizer(settings.tokenizer, vocabulary, "set the tokenizer that the weights were trained with")
    demand_same_tokens(where, _ids(vocabulary, tokenizer), tokenizer, loaded)
    if (length := drafting.row_positions()) < loaded.config.length():
        limit = f"requests may have inference.length={loaded.config.length()}"
        raise UserError(f"the draft model {where} has rows of {length} tokens, {limit}: set inference.length={length}")
    plan = Plan.of(parallel)
    sharded = not any(True for _ in drafting.parallel_problems(parallel, None))
    plan = plan if sharded else plan.over_batch()
    if any(leaf.per != "token" for leaf in drafting.cache_leaves(plan.tensor)):
        raise UserError(f"the draft model {where} has layers with a state per request, which can take back no token")
    weights, precision = quantized_weights(origin, drafting), PrecisionConfig(compute=loaded.config.inference.compute)
    draft = Draft(load_weights(drafting, weights, plan, model.mesh, precision, model.options), weights.where)
    if (size := _elements(draft.model)) > (of_model := _elements(model)):
        note = (
            f"{count(size)} weights, more than the {count(of_model)} of the model: drafts will take longer than tokens"
        )
        print(f"warning: the draft model {where} has {note}", file=sys.stderr)
    return draft


def demand_same_tokens(where: str, ids: int, tokenizer: Tokenizer, loaded: Loaded) -> None:
    """Raises UserError unless the draft model has the ids and tokens of the model. where: the draft model."""
    expected = _ids(ids_below(loaded.config.model), loaded.tokenizer)
    if ids != expected:
        raise UserError(
            f"the draft model {where} has {ids} tokens, the model {expected}: use one with the same tokenizer"
        )
    if tokenizer.identity == loaded.tokenizer.identity:
        return
    pieces = zip(token_pieces(tokenizer, ids), token_pieces(loaded.tokenizer, ids), strict=True)
    different = next(((token, *pair) for token, pair in enumerate(pieces) if pair[0] != pair[1]), None)
    if different is not None:
        token, piece, of_model = different
        tokens = f"token {token} of the draft model {where} is {piece!r}, that of the model {of_model!r}"
        raise UserError(f"{tokens}: use one with the same tokenizer")


def _ids(vocabulary: int | None, tokenizer: Tokenizer) -> int:
    """Number of ids in use."""
    return min(vocabulary or 0, tokenizer.vocabulary_size)


def _elements(model: LoadedModel) -> int:
    return sum(prod(array.shape) for array in jax.tree.leaves(model.weights))
