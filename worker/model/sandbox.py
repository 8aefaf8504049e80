"""Runs a stranger's Jinja template within bounds: no way out of the sandbox, no endless loop, no huge string.

A chat template is code that comes with a model file. Jinja's sandbox keeps it from Python's internals, but
lets it loop and multiply strings at will. Here each loop pass, call, output and string operation draws on
one budget of characters per rendering.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from datetime import datetime
from functools import wraps
from typing import Any, Final, NoReturn

from jinja2 import nodes, pass_environment
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

BUDGET: Final = 1 << 27  # characters a rendering may handle; long prompts have 10**6
_MIN_STEP: Final = 1000  # characters a loop pass or call is charged at least: 134,000 passes in all
MAX_SOURCE: Final = 1 << 20
_PADDING = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs", "format_map", "translate", "encode"})
# fmt: off
_FILTERS = frozenset(
    {
        "abs", "attr", "capitalize", "count", "d", "default", "dictsort", "e", "escape",
        "first", "float", "forceescape", "groupby", "int", "items", "join", "last", "length",
        "list", "lower", "map", "max", "min", "reject", "rejectattr", "replace", "reverse", "round",
        "safe", "select", "selectattr", "sort", "string", "sum", "title", "trim", "truncate",
        "unique", "upper", "wordcount",
    }
)
# fmt: on
_WIDE = re.compile(r"\d{4}|\*|\{[^{}]*\{")  # a field width in the thousands, or one taken from an argument


class RefusedError(TemplateError):
    """The template called raise_exception: it does not accept these messages."""


_left: ContextVar[list[int]] = ContextVar("_left")


def _spend(characters: int) -> None:
    left = _left.get(None)
    if left is None:
        return  # constants folded while the template is compiled
    left[0] -= characters
    if left[0] < 0:
        raise SecurityError("the template does not end, or writes too much")


class Sandbox(ImmutableSandboxedEnvironment):
    """One template, in Jinja as Hugging Face sets it up (whitespace, filters, functions), with a budget.

    The template is compiled once; `run` may be called from several threads.
    """

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, template: str) -> None:
        """Compile `template`; raises jinja2.TemplateError where that fails."""
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols, _Generation],
            finalize=_charged,
            cache_size=0,
        )
        filters = {name: self.filters[name] for name in _FILTERS}
        filters |= {"tojson": _to_json, "indent": _indent, "join": _join, "replace": _replace}
        self.filters = {name: _charging(function) for name, function in filters.items()}
        self.filters["_metered"] = self._metered
        kept = {name: self.globals[name] for name in ("range", "dict", "namespace", "joiner", "cycler")}
        self.globals = kept | {"raise_exception": _refuse, "strftime_now": _strftime_now}
        if len(template) > MAX_SOURCE:
            raise SecurityError(f"the template has {len(template)} characters")
        # What a pass of a loop may write of the template's own text is paid for with the pass.
        self._step = max(_MIN_STEP, len(template))
        self._template = self.from_string(template)

    def run(self, variables: Mapping[str, Any]) -> str:
        """Render once, on a fresh budget. Raises jinja2.TemplateError, or whatever the template provokes."""
        token = _left.set([BUDGET])
        try:
            parts = []
            for part in self._template.generate(variables):
                _spend(len(part))
                parts.append(part)
            return "".join(parts)
        finally:
            _left.reset(token)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        metered: nodes.Template = _Metering().visit(tree)
        return metered

    def _metered(self, items: Any) -> Any:
        """What a `for` loops over, paid for before the loop starts."""
        if not hasattr(items, "__len__"):
            items = list(items)
        _spend(len(items) * self._step)
        return items

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Jinja's rules, and no string methods that pad to any length."""
        return not (isinstance(obj, str) and attr in _PADDING) and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Jinja's guarded str.format, without wide fields."""
        wrapped = super().wrap_str_format(value)
        if wrapped is not None and _WIDE.search(value.__self__):
            raise SecurityError("the template pads to a large width")
        return wrapped

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call as Jinja does, charging the step and what it returns."""
        _spend(self._step)
        owner, name = getattr(obj, "__self__", None), getattr(obj, "__name__", "")
        if isinstance(owner, str):
            _spend_on_growth(name, owner, args)
        return _charged(super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """The arithmetic that can blow up: repetition, powers, formatting, doubling."""
        if operator == "*":
            for items, times in ((left, right), (right, left)):
                if isinstance(items, str | list | tuple) and isinstance(times, int):
                    _spend(len(items) * max(0, times))
        elif operator == "**" and (abs(left) > 1 << 16 or abs(right) > 64):
            raise SecurityError("the template raises to a large power")
        elif operator == "%" and isinstance(left, str) and _WIDE.search(left):
            raise SecurityError("the template pads to a large width")
        result = super().call_binop(context, operator, left, right)
        if isinstance(result, int) and result.bit_length() > 4096:
            raise SecurityError("the template computes with huge numbers")
        return _charged(result)


class _Metering(NodeTransformer):
    """Rewrites a parsed template so that loops and `~` pass by the budget."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 - Jinja's visitor names
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, "_metered", [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        texts = [nodes.Filter(part, "string", [], [], None, None, lineno=node.lineno) for part in node.nodes]
        joined: nodes.Expr = texts[0]
        for text in texts[1:]:
            joined = nodes.Add(joined, text, lineno=node.lineno)
        return joined


class _Generation(Extension):
    """`{% generation %}`, with which training templates mark the answer; for us its body alone matters."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's name and type

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _charged(value: Any) -> Any:
    if isinstance(value, str | list | tuple):
        _spend(len(value))
    return value


def _charging(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that pays for what it returns."""

    @wraps(function)  # copies Jinja's marks too, such as pass_environment
    def charged(*args: Any, **kwargs: Any) -> Any:
        return _charged(function(*args, **kwargs))

    return charged


def _spend_on_growth(method: str, text: str, args: tuple[Any, ...]) -> None:
    """Pay for `text.replace(*args)` or `text.join(*args)` before it is computed."""
    if method == "replace" and len(args) >= 2:
        _spend((text.count(str(args[0])) + 1) * len(str(args[1])))
    elif method == "join" and args and hasattr(args[0], "__len__"):
        _spend(len(text) * len(args[0]))


def _refuse(message: object) -> NoReturn:
    raise RefusedError(str(message))


def _strftime_now(layout: str) -> str:
    if _WIDE.search(layout):
        raise SecurityError("the template pads to a large width")
    return datetime.now().strftime(layout)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own tojson escapes for HTML, which no model was trained on.
    if indent is not None and indent > 16:
        raise SecurityError("the template indents too deep")
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _replace(text: object, old: str, new: str, count: int = -1) -> str:
    _spend_on_growth("replace", str(text), (old, new))
    return str(text).replace(old, new, count)


@pass_environment
def _join(sandbox: Sandbox, items: Iterable[Any], separator: str = "", attribute: str | None = None) -> str:
    texts = [str(item if attribute is None else sandbox.getitem(item, attribute)) for item in items]
    _spend_on_growth("join", separator, (texts,))
    return separator.join(texts)


def _indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    pad = width if isinstance(width, str) else " " * min(width, 64)
    _spend_on_growth("replace", text, ("\n", pad))
    lines = enumerate(text.split("\n"))
    return "\n".join(pad + line if (line or blank) and (index or first) else line for index, line in lines)
