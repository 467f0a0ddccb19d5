"""Any `optax.GradientTransformation` as the optimizer of a run.

The transformation gets flat dicts from path to array. By default it sees each layer's own weights: it is mapped over
the rows of stacked weights by vmap. This is correct if no weight's update depends on another weight, which
`dependencies` checks on the traced update; a transformation that combines weights, such as clipping by the global norm,
is refused. With `per_layer=false` it sees the stacked arrays instead.

Its state is stored in the form of every other optimizer's state: an array that belongs to a weight is stored by name
and path, with the rows of a stacked weight as the leading dimension, any other array by name. Layouts, offload,
checkpoints and the order of rows therefore do not depend on optax.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.extend.core import Jaxpr, Literal

from megajax.batch import Params
from megajax.config.class_references import resolve
from megajax.config.errors import UserError
from megajax.layers.param import ParamSpec
from megajax.mesh.sharding_rules import Plan
from megajax.optim.config import OptaxConfig
from megajax.optim.groups import ParameterGroup, Rates
from megajax.optim.moments import OptimizerState
from megajax.optim.optimizer import Optimizer

type Shapes = dict[str, jax.ShapeDtypeStruct]
type Names = frozenset[str]

RATE = jax.ShapeDtypeStruct((), jnp.float32)
"""A learning rate."""
NONE: Names = frozenset()


class StateLeaf(NamedTuple):
    """Where an array of the transformation's state is stored."""

    name: str
    path: str | None
    """The weight that the array belongs to; None: it belongs to no weight."""

    def __str__(self) -> str:
        return self.name if self.path is None else f"{self.name} of {self.path}"


class OptaxOptimizer(Optimizer):
    """p <- p + update - lr * decay * p, with the update of `make(learning_rate=lr, **settings)`.

    Every update calls `make` with the learning rate of that step, a traced float32 [], as `optax.inject_hyperparams`
    does. Weight decay is decoupled; decay is the group's.
    """

    cfg: OptaxConfig

    def __init__(
        self, cfg: OptaxConfig, declared: Mapping[str, ParamSpec], plan: Plan | None = None, width: float = 1.0
    ):
        """Raises UserError for a reference that cannot be loaded and for a transformation that cannot be used."""
        if width != 1:
            raise UserError(
                "model.width_scaling with optimizer.type=Optax: there is no rule for how a transformation's learning "
                "rates follow the width. Use another optimizer, or scale updates within the transformation."
            )
        super().__init__(cfg, declared)
        self._make = self._function()
        stacked = {path: len(spec.layers) for path, spec in self.declared.items()}
        self._rows = stacked if cfg.per_layer else dict.fromkeys(stacked, 0)
        """Path -> number of rows over which the transformation is mapped; 0: it gets the whole array."""
        inputs: Shapes = {
            path: jax.ShapeDtypeStruct(spec.shape[1:] if self._rows[path] else spec.shape, jnp.float32)
            for path, spec in self.declared.items()
        }
        state = self._attempt(lambda: jax.eval_shape(lambda lr, p: self._transformation(lr).init(p), RATE, inputs))
        leaves, self._tree = jax.tree_util.tree_flatten_with_path(state)
        self._places = _places([keys for keys, _ in leaves], self.declared)
        if len(set(self._places)) < len(self._places):
            raise self._error("has two arrays of the same name in its state")
        for place, (_, leaf) in zip(self._places, leaves, strict=True):
            if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
                reason = "Checkpoints cannot store them, and every layer would draw the same numbers."
                raise self._error(f"keeps random keys ({place}). {reason}")
        self._check(inputs)

    def init(self, params: Params) -> OptimizerState:
        """The state before the first update; zeros in padding rows."""
        mapped = self._over_rows(self._first_state, ins=("rate", "weights"), out="state")
        # Jitted: the learning rate must be traced here as it is in updates.
        return jax.jit(lambda lr, weights: self._only_layers(mapped(lr, weights)))(jnp.zeros(()), dict(params))

    def update(
        self, grads: Params, state: OptimizerState, params: Params, *, rates: Rates
    ) -> tuple[Params, OptimizerState]:
        """One update. grads float32, already divided and clipped. -> new weights and state."""
        lr, _ = rates(ParameterGroup())
        mapped = self._over_rows(
            self._one_update, ins=("rate", "weights", "state", "weights"), out=("weights", "state")
        )
        updates, new = self._only_layers(mapped(lr, dict(grads), state, dict(params)))
        decays = {group: rates(group)[1] for group in dict.fromkeys(self.groups.values()) if group.decay}
        for path, p in params.items():
            if (group := self.groups[path]) in decays:
                updates[path] = updates[path] - lr * decays[group] * p
        return {path: p + updates[path] for path, p in params.items()}, new

    def kinds(self) -> dict[str, str]:
        return dict.fromkeys(self.declared, self.cfg.make)

    def _function(self) -> Callable[..., Any]:
        try:
            function = resolve(self.cfg.make)
        except Exception as error:
            hint = "Give module:function or file.py:function, such as optax:adafactor."
            raise self._error(f"cannot be loaded: {type(error).__name__}: {error}\n{hint}") from error
        if not callable(function):
            raise self._error(f"is of type {type(function).__name__}, not a function")
        return function

    def _transformation(self, lr: Array) -> optax.GradientTransformationExtraArgs:
        transformation = self._make(learning_rate=lr, **self.cfg.settings)
        if not isinstance(transformation, optax.GradientTransformation):
            raise self._error(f"returned a {type(transformation).__name__}, not an optax.GradientTransformation")
        return optax.with_extra_args_support(transformation)

    def _first_state(self, lr: Array, params: Params) -> OptimizerState:
        """The stored state of `init`, for weights as the transformation sees them."""
        return self._stored(self._transformation(lr).init(params))

    def _one_update(
        self, lr: Array, grads: Params, state: OptimizerState, params: Params
    ) -> tuple[Params, OptimizerState]:
        """The updates and the stored state, for weights as the transformation sees them."""
        leaves = [state[name] if path is None else state[name][path] for name, path in self._places]
        result: Any = self._transformation(lr).update(grads, self._tree.unflatten(leaves), params)
        updates, new = result
        return updates, self._stored(new)

    def _stored(self, state: object) -> OptimizerState:
        """The transformation's state in the form in which it is stored."""
        leaves, tree = jax.tree_util.tree_flatten(state)
        if tree != self._tree:
            raise self._error("returns a state of another structure from its update than from its init")
        # Python numbers are weakly typed arrays; with them the step would be compiled a second time.
        arrays = iter(jnp.asarray(leaf).astype(jnp.result_type(leaf)) for leaf in leaves)
        return self._by_place(lambda place: next(arrays))

    def _over_rows(self, f: Callable, *, ins: tuple[str, ...], out: str | tuple[str, ...]) -> Callable:
        """f, mapped over the rows of stacked weights by nested vmaps, one for each number of rows.

        ins, out: the kinds of arguments and results: "rate", "weights" or "state". Each vmap maps the weights with its
        number of rows only; their results depend on no others.
        """
        for count in sorted(set(self._rows.values()) - {0}):
            weights = {path: 0 if rows == count else None for path, rows in self._rows.items()}
            state = self._by_place(lambda place, weights=weights: weights.get(place.path))
            axes = {"rate": None, "weights": weights, "state": state}
            outputs = axes[out] if isinstance(out, str) else tuple(axes[kind] for kind in out)
            f = jax.vmap(f, in_axes=tuple(axes[kind] for kind in ins), out_axes=outputs)
        return f

    def _by_place(self, of: Callable[[StateLeaf], Any]) -> dict[str, Any]:
        """A tree with the structure of the stored state; of(place) is called in the order of the state's leaves."""
        tree: dict[str, Any] = {}
        for place in self._places:
            if place.path is None:
                tree[place.name] = of(place)
            else:
                tree.setdefault(place.name, {})[place.path] = of(place)
        return tree

    def _only_layers[T](self, tree: T) -> T:
        """The tree with zeros in padding rows, where a transformation may compute NaN."""

        def masked(keys: tuple, leaf: Array) -> Array:
            spec = self.declared.get(getattr(keys[-1], "key", ""))
            if spec is None or -1 not in spec.layers:
                return leaf
            layers = jnp.asarray(spec.layers).reshape(-1, *[1] * (leaf.ndim - 1))
            return jnp.where(layers >= 0, leaf, jnp.zeros((), leaf.dtype))

        return jax.tree_util.tree_map_with_path(masked, tree)

    def _check(self, inputs: Shapes) -> None:
        """Traces init and update for weights of these shapes. Raises UserError for an unusable transformation."""
        own_names = {path: frozenset({path}) for path in inputs}
        of_state = self._by_place(lambda place: own_names.get(place.path, NONE))
        first, state = self._attempt(lambda: jax.make_jaxpr(self._first_state, return_shape=True)(RATE, inputs))
        traced, (updates, new) = self._attempt(
            lambda: jax.make_jaxpr(self._one_update, return_shape=True)(RATE, inputs, state, inputs)
        )
        self._check_same("updates", inputs, updates)
        self._check_same("state", state, new)
        starts = _names(first.jaxpr, (NONE, own_names), state)
        needs, keeps = _names(traced.jaxpr, (NONE, own_names, of_state, own_names), (updates, new))
        if self.cfg.per_layer:
            self._check_independence("the update", needs)
            self._check_independence("the state", starts)
            self._check_independence("the state", keeps)
        else:
            self._check_rows(state, keeps)

    def _check_same(self, part: str, before: object, after: object) -> None:
        if jax.tree.structure(before) != jax.tree.structure(after):
            raise self._error(f"makes {part} of another structure than the weights'")
        pairs = zip(jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(after), strict=True)
        for (keys, leaf), now in pairs:
            if (leaf.shape, leaf.dtype) != (now.shape, now.dtype):
                change = f"{leaf.dtype}{[*leaf.shape]} to {now.dtype}{[*now.shape]}"
                rule = "Shapes and dtypes must stay; weights and gradients are float32."
                raise self._error(f"changes {part} {jax.tree_util.keystr(keys)} from {change}. {rule}")

    def _check_independence(self, part: str, tree: Mapping[str, Any]) -> None:
        """Raises UserError if an array depends on a weight other than its own and one of the two is mapped.

        tree: names of weights by path or, for the state, as it is stored.
        """
        for keys, names in jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_names):
            path = keys[-1].key
            other_weights = sorted(names - {path})
            if other_weights and any(self._rows.get(name) for name in (path, *other_weights)):
                more = " and others" if len(other_weights) > 3 else ""
                raise self._error(
                    f"combines weights: {part} of {path} depends on {', '.join(other_weights[:3])}{more}, but it sees "
                    "one layer at a time.\n"
                    "To clip by the global norm, use optimizer.clip and leave it out of the transformation. For a "
                    "transformation that treats all elements of a weight alike, as Adam does, set "
                    "optimizer.per_layer=false."
                )

    def _check_rows(self, state: OptimizerState, keeps: Mapping[str, Any]) -> None:
        """Raises UserError for state of stacked weights with other rows than the weights.

        Resuming on another pipeline reorders rows. An array that belongs to no weight, depends on a stacked weight and
        is at least as large is assumed to join weights.
        """
        stacked = {path: spec.shape for path, spec in self.declared.items() if spec.layers}
        least = min((math.prod(shape) for shape in stacked.values()), default=0)
        for place in self._places:
            name, path = place
            leaf = state[name] if path is None else state[name][path]
            joined = path is None and leaf.size >= least and not stacked.keys().isdisjoint(keeps[name])
            if joined or (path in stacked and leaf.shape != stacked[path]):
                raise self._error(
                    f"with optimizer.per_layer=false keeps {place} of shape {[*leaf.shape]}, whose rows do not "
                    "correspond to layers. Set optimizer.per_layer=true."
                )

    def _error(self, message: str) -> UserError:
        return UserError(f"optimizer.make={self.cfg.make} {message}")

    def _attempt[T](self, f: Callable[[], T]) -> T:
        """f(), which runs the user's code; its exceptions become UserErrors."""
        try:
            return f()
        except UserError:
            raise
        except Exception as error:
            raise self._error(
                f"failed: {type(error).__name__}: {str(error).partition('\n')[0]}\n"
                "The function is called as make(learning_rate=..., **optimizer.settings) with a traced learning rate, "
                "its result as init(weights) and update(gradients, state, weights) with dicts from path to array."
            ) from error


def _is_names(x: object) -> bool:
    return isinstance(x, frozenset)


def _names(jaxpr: Jaxpr, inputs: object, like: object) -> Any:
    """A tree like the outputs with the weights that each array depends on. inputs: the same for the arguments."""
    return jax.tree.unflatten(jax.tree.structure(like), dependencies(jaxpr, jax.tree.leaves(inputs, is_leaf=_is_names)))


def _places(leaves: list[tuple], declared: Mapping[str, ParamSpec]) -> list[StateLeaf]:
    """Places of the arrays of a state, from the keys to each array.

    An array belongs to a weight if the weight's path is one of its keys, in a dict whose keys are all weight paths.
    """
    names = [[getattr(key, "key", None) for key in keys] for keys in leaves]
    dicts: dict[tuple, set[Any]] = {}
    for keys, key_names in zip(leaves, names, strict=True):
        for at, name in enumerate(key_names):
            dicts.setdefault(keys[:at], set()).add(name)
    of_weights = {keys for keys, members in dicts.items() if members <= declared.keys()}
    places = []
    for keys, key_names in zip(leaves, names, strict=True):
        at = next((at for at in range(len(keys)) if keys[:at] in of_weights), None)
        rest = keys if at is None else (*keys[:at], *keys[at + 1 :])
        name = jax.tree_util.keystr(rest, simple=True, separator=".") or "state"
        places.append(StateLeaf(name, None if at is None else key_names[at]))
    return places


def dependencies(jaxpr: Jaxpr, inputs: Sequence[Names]) -> list[Names]:
    """For each output, the names of the inputs that it may depend on. inputs: the names of each input.

    Calls and branches are traced for each output. Outputs of all other operations, including loops, are assumed to
    depend on all inputs of the operation.
    """
    by_variable: dict[Any, Names] = dict(zip(jaxpr.invars, inputs, strict=True))

    def names(variable: object) -> Names:
        return NONE if isinstance(variable, Literal) else by_variable.get(variable, NONE)

    for equation in jaxpr.eqns:
        input_names = [names(variable) for variable in equation.invars]
        match equation.primitive.name:
            case "jit" | "pjit":
                output_names = dependencies(equation.params["jaxpr"].jaxpr, input_names)
            case "cond":
                branches = [dependencies(branch.jaxpr, input_names[1:]) for branch in equation.params["branches"]]
                output_names = [input_names[0].union(*branch_names) for branch_names in zip(*branches, strict=True)]
            case _:
                output_names = [NONE.union(*input_names)] * len(equation.outvars)
        by_variable.update(zip(equation.outvars, output_names, strict=True))
    return [names(variable) for variable in jaxpr.outvars]
