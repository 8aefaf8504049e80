"""Parsing of the fields about tools, in the shapes of OpenAI's API, into `Tools`.

The fields are `tools`, `tool_choice` and `parallel_tool_calls`. A choice may also be just the function's
name, for the command line and tables.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from nightmill.jobs.base.contract import JsonObject, Tools
from nightmill.jobs.errors import InvalidParameterError, RowCode
from nightmill.jobs.request import checks
from nightmill.jobs.request.prompts import json_type
from nightmill.jobs.request.schemas import MAX_DEPTH, check_schema, deeper_than

MAX_TOOLS = 128
MAX_BYTES = 256 << 10
"""Largest total size of a row's tools as JSON, in bytes."""
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_CHOICES = ("none", "auto", "required")
_FUNCTION_KEYS = frozenset({"name", "description", "parameters", "strict"})
_LONGEST_DESCRIPTION = 65_536  # characters


class ToolKey(NamedTuple):
    """A field about tools."""

    type: Any
    says: str


TOOL_KEYS: dict[str, ToolKey] = {
    "tools": ToolKey(Sequence[Mapping[str, Any]], "Functions that the model may call, in OpenAI's form."),
    "tool_choice": ToolKey(
        str, "Whether the model calls functions: auto, none, required, or the name of one."
    ),
    "parallel_tool_calls": ToolKey(bool, "Allow several calls in an answer; true by default."),
}
"""Fields about tools by name."""


def tools_by(values: Mapping[str, Any]) -> Tools | None:
    """Parse the fields named in TOOL_KEYS; None if no function may be called.

    Raises InvalidParameterError.
    """
    value, choice, parallel = (values.get(name) for name in TOOL_KEYS)
    if not isinstance(parallel, bool | None):
        raise _bad("parallel_tool_calls", f"must be true or false, not {json_type(parallel)}")
    tools = _tools(value)
    choice = _choice(choice)
    if choice in (None, "auto", "none") and (not tools or choice == "none"):
        return None
    if not tools:
        raise _bad(
            "tool_choice", "asks for a call, but there are no tools; give tools", RowCode.MISSING_FIELD
        )
    checked = Tools(
        tools,
        required=choice not in (None, "auto"),
        function=None if choice in (None, *_CHOICES) else choice,
        parallel=parallel is not False,
    )
    if checked.function is not None and checked.function not in checked.names:
        known = ", ".join(sorted(checked.names))[:200]
        raise _bad("tool_choice", f"names {checked.function!r}, which is not one of the tools: {known}")
    _check_enforced(checked)
    return checked


def check_read(tools: Tools) -> None:
    """Check tools that were read from a row; raises InvalidParameterError."""
    choice = tools.function or ("required" if tools.required else "auto")
    said = {"tools": tools.functions, "tool_choice": choice, "parallel_tool_calls": tools.parallel}
    if tools_by(said) != tools:
        raise _bad("tools", "were not written by this version")


def _tools(value: Any) -> list[JsonObject]:
    if value is None:
        return []
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Sequence):
        raise _bad("tools", f"must be a list of functions, not {json_type(value)}")
    if len(value) > MAX_TOOLS:
        raise _bad("tools", f"has {len(value):,} functions, more than {MAX_TOOLS}; give fewer")
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, default=dict)
    except (TypeError, ValueError, RecursionError) as error:
        raise _bad("tools", f"is not JSON: {error}") from None
    if (size := len(text.encode(errors="replace"))) > MAX_BYTES:
        raise _bad("tools", f"has {size:,} bytes, more than {MAX_BYTES:,}; give fewer or shorter ones")
    plain = json.loads(text)
    try:
        checks.json_object({"tools": plain})
    except ValueError as error:
        raise _bad("tools", str(error)) from None
    tools = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(plain)]
    names = [tool["function"]["name"] for tool in tools]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise _bad(f"tools[{index}].function.name", f"{name!r} is there twice; give each its own")
    return tools


def _tool(tool: Any, place: str) -> JsonObject:
    if not isinstance(tool, dict):
        raise _bad(place, f'must be {{"type": "function", "function": ...}}, not {json_type(tool)}')
    if (kind := tool.get("type")) != "function":
        said = f"must be 'function' (got {str(kind)[:100]!r}): nothing else can be called here; remove it"
        raise _bad(f"{place}.type", said, RowCode.UNSUPPORTED_FIELD)
    for name in tool.keys() - {"type", "function"}:
        raise _bad(f"{place}.{name}", "is not supported; remove it", RowCode.UNSUPPORTED_FIELD)
    return {"type": "function", "function": _function(tool.get("function"), f"{place}.function")}


def _function(function: Any, place: str) -> JsonObject:
    if not isinstance(function, dict):
        raise _bad(place, f"must be an object with a name, not {json_type(function)}")
    for name in sorted(function.keys() - _FUNCTION_KEYS):
        said = f"is not supported: remove it; known are {', '.join(sorted(_FUNCTION_KEYS))}"
        raise _bad(f"{place}.{name[:100]}", said, RowCode.UNSUPPORTED_FIELD)
    values = {name: value for name, value in function.items() if value is not None}
    name, parameters = values.get("name"), values.get("parameters", {})
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        rule = "must have 1 to 64 letters, digits and _ . -"
        raise _bad(f"{place}.name", f"{rule} (got {str(name)[:100]!r})")
    description = values.get("description", "")
    if not isinstance(description, str) or len(description) > _LONGEST_DESCRIPTION:
        raise _bad(f"{place}.description", f"must be a text of up to {_LONGEST_DESCRIPTION:,} characters")
    if not isinstance(values.get("strict", False), bool):
        raise _bad(f"{place}.strict", "must be true or false")
    if not isinstance(parameters, dict):
        raise _bad(f"{place}.parameters", f"must be a JSON schema, not {json_type(parameters)}")
    if parameters.get("type", "object") != "object":
        said = "must describe an object, since a call has its arguments by name"
        raise _bad(f"{place}.parameters.type", said)
    if deeper_than(parameters, MAX_DEPTH):
        raise _bad(f"{place}.parameters", f"is nested more than {MAX_DEPTH} levels deep; flatten it")
    # Some templates read all of these without checking that they exist.
    return {
        "name": name,
        "description": description,
        "parameters": parameters or {"type": "object", "properties": {}},
    } | ({"strict": values["strict"]} if "strict" in values else {})


def _choice(value: Any) -> str | None:
    """Parse a tool choice into one of _CHOICES or the name of a function."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, Mapping) and value.get("type") == "function":
        function = value.get("function", value)  # OpenAI's later endpoint has the name beside the type
        name = function.get("name") if isinstance(function, Mapping) else None
        if isinstance(name, str) and name not in _CHOICES:
            return name
    shape = '{"type": "function", "function": {"name": ...}}'
    raise _bad("tool_choice", f"must be one of {', '.join(_CHOICES)}, or {shape} (got {str(value)[:100]!r})")


def _check_enforced(tools: Tools) -> None:
    """Check that tool argument schemas can be enforced."""
    for index, tool in enumerate(tools.functions):
        function = tool["function"]
        enforced = tools.required or function.get("strict")
        if enforced and tools.function in (None, function["name"]):
            try:
                check_schema(function["parameters"])
            except ValueError as error:
                raise _bad(f"tools[{index}].function.parameters", str(error)) from None


def _bad(place: str, said: str, code: RowCode = RowCode.INVALID_VALUE) -> InvalidParameterError:
    return InvalidParameterError(f"{place}: {said}", field=place, code=code)
