"""Conversion between items of /v1/responses and messages of a chat.

A model's turn is one message of a chat but several items: its reasoning, its text, and each of its calls.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from nightmill.jobs.base.contract import JsonObject
from nightmill.jobs.formats.rows import invalid, missing
from nightmill.jobs.formats.shapes import (
    called,
    items_of,
    joined,
    mapping,
    only,
    text_of,
    type_of,
    unsupported,
)

MAX_ITEMS = 100_000
ROLES = ("user", "assistant", "system", "developer")
_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_THOUGHTS = {"reasoning_text": "text", "summary_text": "text", "text": "text"}
_TEXT_ALONE = "models here read text alone; give it as text"
_NOT_RUN = "this server runs no tools itself; give what it found as text"
_REFERENCE = "give the item itself, or previous_response_id"
_MARKS = frozenset({"type", "id", "status", "phase"})  # keys of any item that do not affect the prompt


class ItemMessage(NamedTuple):
    """A message, and the place of its first item in the request."""

    message: JsonObject
    place: str


def read_input(value: Any) -> list[ItemMessage]:
    """Parse `input`, a text or a list of items, into messages; raises InvalidRequestError."""
    if isinstance(value, str):
        return [ItemMessage({"role": "user", "content": text_of(value, "input")}, "input")]
    items = items_of(value, "input")
    if not items:
        raise invalid("input", "is empty; give a text, or an item")
    if len(items) > MAX_ITEMS:
        raise invalid("input", f"has {len(items):,} items, more than {MAX_ITEMS:,}; give fewer")
    turns = _Turns()
    for index, item in enumerate(items):
        place = f"input[{index}]"
        item = mapping(item, place, "an item, an object with a type")
        kind = "message" if item.get("type") is None and "role" in item else None
        if item.get("type") == "item_reference":
            raise unsupported(f"{place}.type", f"'item_reference' is not supported: {_REFERENCE}")
        kind = kind or type_of(item, place, _READ, _NOT_RUN)
        _READ[kind](turns, item, place)
    return turns.over()


class _Turns:
    """A builder that merges the items of each turn of the model."""

    def __init__(self) -> None:
        self._messages: list[ItemMessage] = []
        self._open: JsonObject | None = None  # the model's turn that may continue
        self._thoughts: list[str] = []  # reasoning of that turn

    def say(self, role: str, content: str, place: str) -> None:
        """Add a message with one text."""
        if role != "assistant":
            self._add({"role": role, "content": content}, place)
        elif self._open is None or self._has_spoken(self._open):
            self._begin(place)["content"] = content
        else:
            self._open["content"] = content

    def think(self, text: str, place: str) -> None:
        """Add reasoning, which begins a turn."""
        if self._open is None or self._has_spoken(self._open):
            self._begin(place)
        self._thoughts.append(text)

    def call(self, call: JsonObject, place: str) -> None:
        """Add a tool call."""
        turn = self._begin(place) if self._open is None else self._open
        turn.setdefault("tool_calls", []).append(call)

    def answer(self, call_id: Any, output: str, place: str) -> None:
        """Add the output of a tool call."""
        self._add({"role": "tool", "tool_call_id": call_id, "content": output}, place)

    def over(self) -> list[ItemMessage]:
        """Return all messages."""
        self._close()
        return self._messages

    def _begin(self, place: str) -> JsonObject:
        turn: JsonObject = {"role": "assistant", "content": ""}
        self._add(turn, place)
        self._open = turn
        return turn

    def _add(self, message: JsonObject, place: str) -> None:
        self._close()
        self._messages.append(ItemMessage(message, place))

    def _close(self) -> None:
        if self._open is not None and self._thoughts:
            self._open["reasoning_content"] = "".join(self._thoughts)
        self._open, self._thoughts = None, []

    @staticmethod
    def _has_spoken(turn: JsonObject) -> bool:
        return bool(turn["content"]) or "tool_calls" in turn


def _message(turns: _Turns, item: Mapping[str, Any], place: str) -> None:
    only(item, {"role", "content"}, place, ignored=_MARKS)
    role = item.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise invalid(f"{place}.role", f"must be one of {', '.join(ROLES)} (got {str(role)[:100]!r})")
    turns.say(role, joined(item.get("content"), f"{place}.content", _TEXTS, _TEXT_ALONE), place)


def _reasoning(turns: _Turns, item: Mapping[str, Any], place: str) -> None:
    """Add reasoning; its summary is used if the program stored nothing else."""
    only(item, {"content", "summary"}, place, ignored=_MARKS | {"encrypted_content"})
    whole = "content" if item.get("content") else "summary"
    thoughts = joined(item.get(whole) or [], f"{place}.{whole}", _THOUGHTS, _TEXT_ALONE)
    if thoughts:
        turns.think(thoughts, place)


def _call(turns: _Turns, item: Mapping[str, Any], place: str) -> None:
    only(item, {"call_id", "name", "arguments"}, place, ignored=_MARKS)
    for name in ("call_id", "name"):
        if item.get(name) is None:
            raise missing(f"{place}.{name}", "a call has call_id, name, arguments")
    arguments = text_of(item.get("arguments"), f"{place}.arguments")
    turns.call(called(item["call_id"], item["name"], arguments), place)


def _output(turns: _Turns, item: Mapping[str, Any], place: str) -> None:
    only(item, {"call_id", "output"}, place, ignored=_MARKS | {"name"})
    if item.get("call_id") is None:
        raise missing(f"{place}.call_id", "name the call that this is the output of")
    output = joined(item.get("output"), f"{place}.output", _TEXTS, _TEXT_ALONE)
    turns.answer(item["call_id"], output, place)


_READ: dict[str, Callable[[_Turns, Mapping[str, Any], str], None]] = {
    "message": _message,
    "function_call": _call,
    "function_call_output": _output,
    "reasoning": _reasoning,
}
"""Readers of items by type."""
_SUFFIXES = (
    ("tool_call_id", "call_id"),
    ("reasoning_content", "content"),
    ("function.name", "name"),
    ("function.arguments", "arguments"),
    ("id", "call_id"),
)
"""Ends of places in messages, with the names in items."""


def place_in_items(place: str, messages: Sequence[ItemMessage]) -> str:
    """Translate a place in messages, such as messages[3].tool_calls[0].function.name, to the caller's
    items."""
    number, _, rest = place.removeprefix("messages[").partition("]")
    if not number.isdigit() or int(number) >= len(messages):
        return "input"
    placed = messages[int(number)]
    if not placed.place.startswith("input["):
        return placed.place
    part = next((theirs for ours, theirs in _SUFFIXES if rest.endswith(f".{ours}")), rest.lstrip("."))
    if not rest.startswith(".tool_calls["):
        return f"{placed.place}.{part}" if part else placed.place
    # Each call of a turn is an item of its own, after the turn's first one.
    index = int(rest.removeprefix(".tool_calls[").partition("]")[0])
    first = int(placed.place.removeprefix("input[").rstrip("]"))
    before = bool(placed.message.get("content")) + ("reasoning_content" in placed.message)
    return f"input[{first + before + index}].{part}"


def message_items(messages: Sequence[JsonObject], job_id: str) -> Iterator[JsonObject]:
    """Yield the items for messages of a job, each with an id."""
    for number, message in enumerate(messages):
        for part, item in enumerate(_items_of(message)):
            kind = _PREFIXES[item["type"]]
            yield {"id": f"{kind}_{job_id}_in{number}_{part}", "status": "completed"} | item


_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}


def _items_of(message: JsonObject) -> Iterator[JsonObject]:
    role, content = message["role"], message.get("content") or ""
    if role == "tool":
        call_id = message.get("tool_call_id", "")
        yield {"type": "function_call_output", "call_id": call_id, "output": content}
        return
    if role != "assistant":
        yield {"type": "message", "role": role, "content": [{"type": "input_text", "text": content}]}
        return
    if thoughts := message.get("reasoning_content"):
        yield reasoning_item(thoughts)
    calls = message.get("tool_calls") or ()
    if content or not (calls or thoughts):
        part: JsonObject = {"type": "output_text", "text": content, "annotations": [], "logprobs": []}
        yield {"type": "message", "role": "assistant", "content": [part]}
    for call in calls:
        function = call["function"]
        yield call_item(call.get("id", ""), function["name"], function["arguments"])


def reasoning_item(thoughts: str) -> JsonObject:
    """Build a reasoning item with the full reasoning, without a summary."""
    return {
        "type": "reasoning",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": thoughts}],
        "encrypted_content": None,
    }


def call_item(call_id: str, name: str, arguments: str) -> JsonObject:
    """Build a function call item."""
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments}
