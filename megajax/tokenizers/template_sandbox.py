"""The environment of chat templates: a sandbox in which time and memory are limited.

Templates come with models of strangers, and servers render them for each request. Jinja2's sandbox keeps them from
Python, but not from `'a' * 10**10` or from loops in loops. Here every loop, call, filter, operator and piece of output
counts, and what an operation creates is counted before it is created. Lists refer to their values, so that only their
entries count; but none may be longer as text than all text together.
"""

import json
import re
from collections.abc import Callable, Collection, ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from datetime import datetime
from functools import wraps
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from megajax.config.read_limits import Budget, Limits

BEGIN, END = "\ufdd0", "\ufdd1"
"""Delimit the text in {% generation %} blocks; Unicode reserves these characters for internal use."""

SOURCE = Limits(bytes=2**18)
"""Of the text of a template. The largest ones of published models have less than 2**16 characters."""
RENDERING = Limits(entries=1_000_000, bytes=2**27, depth=100, seconds=30.0)
"""Of one rendering: operations; characters of all texts and lists that are made on the way; time."""
MOST_BITS = 10_000
"""Of a whole number."""
MOST_DIGITS = 1000
"""Maximum width and precision in a format."""
BUDGET = " budget"
"""Key of a rendering's budget among its variables; not a name in a template because of the blank."""

FILTERS = frozenset({
    "abs", "attr", "batch", "capitalize", "center", "count", "d", "default", "dictsort", "e", "escape", "first",
    "float", "format", "groupby", "indent", "int", "items", "join", "last", "length", "list", "lower", "map", "max",
    "min", "reject", "rejectattr", "replace", "reverse", "round", "safe", "select", "selectattr", "slice", "sort",
    "string", "sum", "tojson", "title", "trim", "truncate", "unique", "upper", "urlencode", "wordcount",
})  # fmt: skip
"""The other filters of Jinja2 have no place in a conversation, and their cost is not known."""
REFERENCES = frozenset({
    "attr", "count", "d", "default", "first", "items", "last", "length", "list", "map", "reject", "rejectattr",
    "reverse", "select", "selectattr",
})  # fmt: skip
"""Filters that refer to the values of a list and copy no text, except for `COPIES`."""
COPIES = frozenset({"list", "reverse"})
SELECTIONS = frozenset({"map", "reject", "rejectattr", "select", "selectattr"})
GROWTH: Mapping[str, int] = {"tojson": 6, "e": 5, "escape": 5, "urlencode": 12}
"""Filter -> largest number of characters that it makes of one."""
SPECIFICATION = re.compile(r"\*|\d+")


class BoundedTemplate:
    """A template with limits. Its methods raise OverBudget and the exceptions of Jinja2."""

    begin, end = BEGIN, END

    def __init__(self, source: str, names: Mapping[str, str], where: str):
        """names: variables; where: the template, for messages."""
        Budget(where, SOURCE).spend(bytes=len(source))
        self._where, self._template = where, _environment().from_string(source, dict(names))

    def render(self, variables: Mapping[str, Any]) -> str:
        """The text for these variables."""
        return self._template.render({**variables, BUDGET: Budget(self._where, RENDERING)})


def _environment() -> "BoundedEnvironment":
    """Jinja2 with the extensions of Hugging Face's templates."""

    def refuse(message: str) -> NoReturn:
        raise TemplateError(message)

    def time_now(form: str) -> str:
        return datetime.now().strftime(form)

    # Without the optimizer, which would compute constants when the template is read.
    bounded = BoundedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], optimized=False, finalize=_output
    )
    bounded.filters["tojson"] = _to_json
    bounded.filters = {name: _bounded_filter(name, bounded.filters[name]) for name in FILTERS}
    del bounded.globals["lipsum"]
    functions: dict[str, Any] = {"namespace": _Namespace, "raise_exception": refuse, "strftime_now": time_now}
    bounded.globals |= functions
    return bounded


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox that counts the operations of a rendering."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Counting().visit(super()._parse(source, name, filename))

    def iterated(self, context: Context, values: Iterable[Any]) -> Iterator[Any]:
        """The values of a loop."""
        return _counted(values, _budget(context))

    def value(self, context: Context, value: Any) -> Any:
        """A value that an expression has made."""
        _budget(context).spend(1)
        return _demand_room(value, _budget(context))

    def part(self, context: Context, value: Any) -> Any:
        """A slice, whose values are those of another list."""
        _budget(context).spend(1, bytes=_copied(value))
        return value

    def joined(self, context: Context, *values: Any) -> str:
        """The operator ~."""
        budget = _budget(context)
        budget.spend(1, bytes=sum(_size(value, budget) for value in values))
        return "".join(map(str, values))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = _budget(context)
        budget.spend(1, bytes=_operator_size(operator, left, right, budget))
        return _demand_room(super().call_binop(context, operator, left, right), budget)

    def call(__self: Any, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(__obj, "__self__", None)
        if owner is __self:
            return __obj(__context, *args)  # without the variables of loops, which Jinja2 adds
        budget = _budget(__context)
        if isinstance(owner, str | bytes | int) and not isinstance(owner, type):
            args = tuple(_materialized(value, budget) for value in args)
            budget.spend(1, bytes=_method_size(owner, __obj.__name__, (*args, *kwargs.values()), budget))
        else:
            budget.spend(1)
        result = super().call(__context, __obj, *args, **kwargs)
        if not isinstance(owner, Mapping | list | tuple):  # their methods return what they hold
            _demand_room(result, budget)
        return result

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        formatted = super().wrap_str_format(value)
        if formatted is None:
            return None
        text: str = value.__self__

        @pass_context
        def bounded(context: Context, *args: Any, **kwargs: Any) -> str:
            if re.search(r"\{[^{}]*:[^{}]*\{", text) or value.__name__ != "format":
                raise TemplateError("only str.format with plain widths is supported")
            budget = _budget(context)
            budget.spend(1, bytes=_formatted_size(text, "{", r":[^{}]*", (*args, *kwargs.values()), budget))
            return formatted(*args, **kwargs)

        return bounded


class _Counting(NodeTransformer):
    """Passes through the environment what the sandbox does not intercept."""

    def _call(self, name: str, *arguments: Any) -> nodes.Call:
        line = arguments[0].lineno if arguments else 0
        method = nodes.EnvironmentAttribute(name, lineno=line)
        return nodes.Call(method, list(arguments), [], None, None, lineno=line)

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = self._call("iterated", node.iter)
        return node

    def _counted(self, node: Any) -> nodes.Expr:
        self.generic_visit(node)
        return self._call("value", node)

    visit_List = visit_Dict = visit_Compare = visit_Test = _counted

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Expr:
        return self._counted(node) if node.ctx == "load" else node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return self._call("part", node) if isinstance(node.arg, nodes.Slice) else node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:
        self.generic_visit(node)
        return self._call("joined", *node.nodes)

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Const:
        """Output of constants is counted like that of variables."""
        return nodes.Const(node.data, lineno=node.lineno)


class _Generation(Extension):
    """{% generation %} … {% endgeneration %} around the text of the assistant."""

    tags = {"generation"}  # noqa: RUF012 as the base class has it

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_between"), [], [], body).set_lineno(line)

    def _between(self, caller: Any) -> str:
        return f"{BEGIN}{caller()}{END}"


class _Namespace(Namespace):
    """A namespace that does not print its values: unlike all others, they can change after they were counted."""

    def __repr__(self) -> str:
        return "<Namespace>"


def _budget(context: Context) -> Budget:
    return context.parent[BUDGET]


@pass_context
def _output(context: Context, value: Any) -> Any:
    """A piece of output, before it becomes text."""
    budget = _budget(context)
    budget.spend(1, bytes=len(value) if isinstance(value, str) else _size(value, budget))
    return value


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **more: Any) -> str:
    """As that of Hugging Face's templates, which does not escape for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **more)


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    kind = getattr(getattr(function, "jinja_pass_arg", None), "name", None)

    @pass_context
    @wraps(function)
    def bounded(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        budget = _budget(context)
        if name in ("join", "string", "tojson", "format"):
            value = _materialized(value, budget)
        refers = name in REFERENCES and not (name in COPIES and isinstance(value, str | bytes))
        if not refers:
            budget.spend(1, bytes=_filtered_size(name, value, (*args, *kwargs.values()), budget))
        elif name in SELECTIONS and value:  # they test their values without the environment
            value = _counted(value, budget)
        first = {"context": (context,), "eval_context": (context.eval_ctx,), "environment": (context.environment,)}
        result = function(*first.get(kind or "", ()), value, *args, **kwargs)
        if not refers:
            budget.spend(bytes=_size(result, budget))
        else:
            budget.spend(1, bytes=_copied(result) if name in COPIES else 0)
        return result

    return bounded


def _materialized(value: Any, budget: Budget) -> Any:
    """The values of a generator as a list."""
    if not isinstance(value, Iterator):
        return value
    return list(_counted(value, budget))


def _counted(values: Iterable[Any], budget: Budget) -> Iterator[Any]:
    for value in values:
        budget.spend(1)
        yield value


def _size(value: Any, budget: Budget, sizes: dict[int, int] | None = None, depth: int = 1) -> int:
    """About the characters of a value as text. What a list holds twice counts twice, but is visited once.

    sizes: sizes of lists and mappings so far, by id.
    """
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, int):
        return value.bit_length() // 3 + 1
    if not isinstance(value, Mapping | list | tuple | set | frozenset | KeysView | ValuesView | ItemsView):
        return 32  # the largest float
    sizes = {} if sizes is None else sizes
    if id(value) not in sizes:
        budget.demand_depth(depth)
        items: Collection[Any] = [*value, *value.values()] if isinstance(value, Mapping) else value
        if isinstance(value, ItemsView):  # its pairs are new objects, whose ids other objects have later
            items = [item for pair in value for item in pair]
        budget.spend(len(items) // 16)
        sizes[id(value)] = 2 + sum([_size(item, budget, sizes, depth + 1) + 2 for item in items])
    return sizes[id(value)]


def _copied(value: Any) -> int:
    """Bytes of a text, or of the references in a list or mapping."""
    if isinstance(value, str | bytes):
        return len(value)
    return 8 * len(value) if isinstance(value, Mapping | list | tuple) else 0


def _demand_room(value: Any, budget: Budget) -> Any:
    """The value. Its bytes count, and what it would be as text is compared with the limit."""
    budget.spend(bytes=_copied(value))
    if not isinstance(value, str | bytes):
        budget.demand_bytes(_size(value, budget))
    return value


def _operator_size(operator: str, left: Any, right: Any, budget: Budget) -> int:
    """Characters of the result. Raises TemplateError for numbers of too many digits."""
    if operator == "%" and isinstance(left, str | bytes):
        return _formatted_size(left, "%", r"%(?:\([^)]*\))?[-#0 +]*[\d.*]*", (right,), budget)
    if isinstance(left, int) and isinstance(right, int):
        bits = (left.bit_length(), right.bit_length())
        if (operator == "*" and sum(bits) > MOST_BITS) or (operator == "**" and bits[0] * abs(right) > MOST_BITS):
            raise TemplateError(f"a number of more than {MOST_BITS} bits")
        return 0
    if operator == "*":
        count, value = (left, right) if isinstance(left, int) else (right, left)
        return _copied(value) * max(count, 0) if isinstance(count, int) else 0
    return _copied(left) + _copied(right)


def _formatted_size(text: Any, mark: str, pattern: str, values: tuple[Any, ...], budget: Budget) -> int:
    """Characters of a text with values in place of marks. Raises TemplateError for widths from values or too large."""
    text = text if isinstance(text, str) else str(text, "latin-1")
    width = 0
    for specification in re.findall(pattern, text):
        for number in SPECIFICATION.findall(specification):
            if number == "*" or len(number) > 9 or int(number) > MOST_DIGITS:
                raise TemplateError(f"a format with a width of {number[:20]}; at most {MOST_DIGITS} is supported")
            width = MOST_DIGITS
    # 400: the digits of the largest float.
    return len(text) + text.count(mark) * (400 + width + sum(_size(value, budget) for value in values))


def _method_size(owner: Any, name: str, args: tuple[Any, ...], budget: Budget) -> int:
    """Characters that a method of a text or number may make or compare."""
    if name in ("translate", "format_map", "striptags", "unescape"):
        raise TemplateError(f"{name} is not supported")
    length = 0 if isinstance(owner, int) else len(owner)
    first = args[0] if args else None
    texts = [len(value) for value in args if isinstance(value, str | bytes)]
    size = length + sum(abs(value) for value in args if isinstance(value, int))
    match name:
        case "replace" if len(texts) > 1 and not isinstance(owner, int):
            return size + owner.count(first) * texts[1]
        case "join" if not isinstance(owner, int):
            return _joined_size(owner, first, budget)
        case "expandtabs":
            return size * (1 + length)
        case "split" | "rsplit" | "splitlines":
            # A list of short texts takes more memory than the text. Searching from the end takes the product.
            pieces = owner.count(first) if texts and texts[0] else length // 2
            return length + 32 * pieces + length * sum(texts) // 64
        case "strip" | "lstrip" | "rstrip" | "rfind" | "rindex" | "rpartition":
            return length + length * sum(texts) // 64
        case "find" | "index" | "count" | "startswith" | "endswith":
            return length
    return size


def _joined_size(separator: Any, values: Any, budget: Budget) -> int:
    count = len(values) if isinstance(values, Collection) else 0
    return _size(values, budget) + count * len(separator)


def _filtered_size(name: str, value: Any, args: tuple[Any, ...], budget: Budget) -> int:
    """Characters that a filter may make. Raises TemplateError for numbers that are too large."""
    size = _size(value, budget)
    texts = [len(text) for text in args if isinstance(text, str)]
    numbers = [abs(number) for number in args if isinstance(number, int)]
    match name:
        case "replace":
            return size + (str(value).count(str(args[0])) * len(str(args[1])) if len(args) > 1 else 0)
        case "join":
            return _joined_size(str(args[0]) if args else "", value, budget)
        case "format":
            return _operator_size("%", str(value), args, budget)
        case "center" | "batch" | "slice":
            return size + sum(numbers)
        case "indent":
            return size + (str(value).count("\n") + 1) * (sum(numbers) + sum(texts))
        case "tojson":
            return size * (GROWTH[name] + sum(numbers) + _size(args, budget))
        case "trim":
            return size + size * sum(texts) // 64
        case "round" | "sum":
            if any(number > MOST_DIGITS for number in numbers) and name == "round":
                raise TemplateError(f"round to more than {MOST_DIGITS} digits")
            if name == "sum" and any(isinstance(start, list | tuple) for start in args):
                raise TemplateError("sum of lists is not supported")
    return size * GROWTH.get(name, 1)
