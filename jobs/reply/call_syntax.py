"""Parsers of tool calls that are not JSON: tags around each argument, Python's calls, Gemma's braces.

What a text cannot say about types follows from the schema of the function: where it wants a text, the
characters between two tags are that text; elsewhere they are JSON, or a constant of Python, or a text.
"""

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

Types = Callable[[str], Mapping[str, Any]]
"""The schemas of a function's arguments by name; empty for a function that is not known."""
Parsed = tuple[str, dict[str, Any]]
"""The name of a function and its arguments."""

_FUNCTION = re.compile(r"\s*<function=([^<>\s]{1,256})>(.*?)</function>", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^<>\n]{1,256})>(.*?)</parameter>", re.DOTALL)
_INVOKED = re.compile(r'\s*<invoke name="([^<>"\n]{1,256})">(.*?)</invoke>', re.DOTALL)
_NAMED_PARAMETER = re.compile(r'\s*<parameter name="([^<>"\n]{1,256})">(.*?)</parameter>', re.DOTALL)
_GLM_NAME = re.compile(r"\s*([^<>\s]{1,256})\s*")
_GLM_ARGUMENT = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
_STRING = re.compile(r"""'(?:[^'\\]|\\.)*+'|"(?:[^"\\]|\\.)*+\"""", re.DOTALL)
_CONSTANTS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_GEMMA_NAME = re.compile(r"\s*call:([A-Za-z0-9_.:/-]{1,256}?)\s*(?=\{)")
_GEMMA_KEY = re.compile(r'\s*(?:<\|"\|>(.*?)<\|"\|>|"((?:[^"\\]|\\.)*)"|([^\s:{}\[\],]+))\s*:', re.DOTALL)
_GEMMA_TEXT = re.compile(r'<\|"\|>(.*?)<\|"\|>', re.DOTALL)
_WORD = re.compile(r"[^\s,\]}{\[]+")
_SPACE = re.compile(r"\s*")
_DEEPEST = 64


def tagged_calls(text: str, types: Types) -> Iterator[Parsed]:
    """Parse `<function=NAME><parameter=KEY>VALUE</parameter>...</function>`, as Qwen3-Coder writes it."""
    return _in_tags(text, types, _FUNCTION, _PARAMETER, lines=True)


def seed_calls(text: str, types: Types) -> Iterator[Parsed]:
    """Parse the same as Seed-OSS writes it, whose values have no lines of their own."""
    return _in_tags(text, types, _FUNCTION, _PARAMETER)


def invoked_calls(text: str, types: Types) -> Iterator[Parsed]:
    """Parse `<invoke name="NAME"><parameter name="KEY">VALUE</parameter>...</invoke>`, as MiniMax M2 writes
    it."""
    return _in_tags(text, types, _INVOKED, _NAMED_PARAMETER)


def _in_tags(
    text: str,
    types: Types,
    function: re.Pattern[str],
    parameter: re.Pattern[str],
    *,
    lines: bool = False,
) -> Iterator[Parsed]:
    """Parse calls whose arguments have tags; of a text that is cut, those that are whole come first.

    `lines`: a value stands in lines of its own.
    """
    place = 0
    while (call := function.match(text, place)) is not None:
        arguments, inside = {}, 0
        known = types(call[1])
        while (argument := parameter.match(call[2], inside)) is not None:
            value = argument[2].removeprefix("\n").removesuffix("\n") if lines else argument[2]
            arguments[argument[1]] = typed(value, known.get(argument[1]))
            inside = argument.end()
        if call[2][inside:].strip():
            raise ValueError("text between arguments")
        yield call[1], arguments
        place = call.end()
    if text[place:].strip():
        raise ValueError("not a call")


def glm_call(text: str, types: Types) -> list[Parsed]:
    """Parse `NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>...`, as GLM writes it."""
    name = _GLM_NAME.match(text)
    if name is None:
        raise ValueError("no name")
    known, arguments, place = types(name[1]), {}, name.end()
    while (argument := _GLM_ARGUMENT.match(text, place)) is not None:
        arguments[argument[1]] = typed(argument[2], known.get(argument[1]))
        place = argument.end()
    if text[place:].strip():
        raise ValueError("text between arguments")
    return [(name[1], arguments)]


def typed(text: str, schema: Any) -> Any:
    """Return the value that a text between tags stands for."""
    if wants_text(schema):
        return text
    stripped = text.strip()
    if stripped in _CONSTANTS:
        return _CONSTANTS[stripped]
    try:
        return json.loads(stripped, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        pass
    if stripped[:1] in "[{":  # templates show Python's lists
        try:
            return _plain(ast.literal_eval(stripped))
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            pass  # TypeError: a list or a dictionary as a key
    return text


def wants_text(schema: Any) -> bool:
    """True for a schema of texts alone."""
    if not isinstance(schema, Mapping):
        return False
    if "type" in schema:
        return bool(schema["type"] in ("string", ["string"]))
    values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema.get("const")]
    return bool(values) and all(isinstance(value, str) for value in values)


def python_calls(text: str, types: Types) -> list[Parsed]:
    """Parse `[f(a=1, b='x'), g()]`, as Llama 4 and LFM2 write it, or one such call."""
    del types
    try:
        # Models break lines inside of strings, which Python does not take.
        text = _STRING.sub(lambda found: found[0].replace("\n", "\\n"), text.strip())
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise ValueError("not Python's syntax") from error
    calls = tree.elts if isinstance(tree, ast.List) else [tree]
    if not calls:
        raise ValueError("no calls")
    return [_python_call(call) for call in calls]


def _python_call(call: ast.expr) -> Parsed:
    if not isinstance(call, ast.Call) or call.args:
        raise ValueError("not a call with named arguments")
    arguments = {}
    for keyword in call.keywords:
        if keyword.arg is None:
            raise ValueError("an argument without a name")
        arguments[keyword.arg] = _constant(keyword.value)
    return _dotted(call.func), arguments


def _dotted(name: ast.expr) -> str:
    if isinstance(name, ast.Attribute):
        return f"{_dotted(name.value)}.{name.attr}"
    if not isinstance(name, ast.Name):
        raise ValueError("not a name")
    return name.id


def _constant(tree: ast.expr, depth: int = 0) -> Any:
    """Return the value of a literal, of Python or of JSON; raises ValueError for anything else."""
    if depth > _DEEPEST:
        raise ValueError("nested too deeply")
    match tree:
        case ast.Constant(value=str() | int() | float() | bool() | None as value):
            return _plain(value)
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return _plain(-value)
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_constant(item, depth + 1) for item in items]
        case ast.Dict(keys=keys, values=values):
            names = [_constant(key) for key in keys if isinstance(key, ast.Constant)]
            if len(names) < len(keys):
                raise ValueError("a key is not a text")  # nor `**`, whose key is None
            made = {name: _constant(value, depth + 1) for name, value in zip(names, values, strict=True)}
            if len(made) < len(keys):
                raise ValueError("a key twice")
            return _plain(made)
    raise ValueError("not a literal")


def _plain(value: Any, depth: int = 0) -> Any:
    """Return a value if JSON can hold it; raises ValueError if it cannot."""
    if depth > _DEEPEST:
        raise ValueError("nested too deeply")
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise ValueError("a key is not a text")
        return {key: _plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, depth + 1) for item in value]
    if isinstance(value, float) and not abs(value) < float("inf"):
        raise ValueError("not a number of JSON")
    if not isinstance(value, str | int | float | bool | None):
        raise ValueError("not a value of JSON")
    return value


def gemma_call(text: str, types: Types) -> list[Parsed]:
    """Parse `call:NAME{KEY:VALUE,...}`, as Gemma 4 writes it; its texts stand between `<|"|>`."""
    del types
    name = _GEMMA_NAME.match(text)
    if name is None:
        raise ValueError("not a call")
    arguments, place = _gemma_value(text, name.end(), 0)
    if text[place:].strip() or not isinstance(arguments, dict):
        raise ValueError("text behind the arguments")
    return [(name[1], arguments)]


def _gemma_value(text: str, place: int, depth: int) -> tuple[Any, int]:
    """Return the value that begins at `place`, and where it ends."""
    if depth > _DEEPEST:
        raise ValueError("nested too deeply")
    place = _spaces(text, place)
    if (quoted := _GEMMA_TEXT.match(text, place)) is not None:
        return quoted[1], quoted.end()
    if text.startswith('"', place):
        return json.JSONDecoder().raw_decode(text, place)
    if text.startswith("{", place):
        made: dict[str, Any] = {}
        place = _spaces(text, place + 1)
        while not text.startswith("}", place):
            key = _GEMMA_KEY.match(text, place)
            if key is None:
                raise ValueError("not a key")
            name = next(one for one in key.groups() if one is not None)
            made[name], place = _gemma_value(text, key.end(), depth + 1)
            place = _after_comma(text, place, "}")
        return made, place + 1
    if text.startswith("[", place):
        items = []
        place = _spaces(text, place + 1)
        while not text.startswith("]", place):
            item, place = _gemma_value(text, place, depth + 1)
            items.append(item)
            place = _after_comma(text, place, "]")
        return items, place + 1
    word = _WORD.match(text, place)
    if word is None:
        raise ValueError("not a value")
    if word[0] in _CONSTANTS:
        return _CONSTANTS[word[0]], word.end()
    return json.loads(word[0], parse_constant=_no_constant), word.end()


def _after_comma(text: str, place: int, end: str) -> int:
    place = _spaces(text, place)
    if text.startswith(",", place):
        return _spaces(text, place + 1)
    if not text.startswith(end, place):
        raise ValueError("neither a comma nor an end")
    return place


def _spaces(text: str, place: int) -> int:
    found = _SPACE.match(text, place)
    return place if found is None else found.end()


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
