"""Conversion of messages of Anthropic's API to messages of a chat: the blocks of a turn become one
message."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Self

from nightmill.jobs.base.contract import JsonObject
from nightmill.jobs.formats.rows import invalid
from nightmill.jobs.formats.shapes import called, flag_of, items_of, joined, mapping, only, text_of, type_of

MAX_MESSAGES = 100_000
ROLES = ("user", "assistant", "system")
_TEXT = {"text": "text"}
_TEXT_ALONE = "models here read text alone; give it as text"
# Citations are not supported, and the worker caches by itself.
_NO_EFFECT = frozenset({"cache_control", "citations"})
_BETWEEN = "\n\n"  # separator of consecutive turns of one role, which are merged
_OF_USERS = {"text": None, "tool_result": None}
_OF_THE_MODEL = {"text": None, "thinking": None, "redacted_thinking": None, "tool_use": None}


class TurnMessage(NamedTuple):
    """A message with its place in the body, the places of its calls, and its texts by turn."""

    message: JsonObject
    place: str
    calls: list[str]
    texts: list[str]

    @classmethod
    def of(cls, role: str, text: str, place: str) -> Self:
        """Make a message with one text."""
        return cls({"role": role, "content": text}, place, [], [text])


def read_system(value: Any) -> list[TurnMessage]:
    """Parse `system` into a message, if given; raises InvalidRequestError."""
    if value is None:
        return []
    said = joined(value, "system", _TEXT, _TEXT_ALONE)
    return [TurnMessage.of("system", said, "system")]


def read_messages(value: Any) -> list[TurnMessage]:
    """Parse the messages of a body; raises InvalidRequestError, which names the block."""
    given = items_of(value, "messages")
    if not 0 < len(given) <= MAX_MESSAGES:
        raise invalid("messages", f"must have 1 to {MAX_MESSAGES:,} messages (got {len(given):,})")
    made: list[TurnMessage] = []
    for index, message in enumerate(given):
        place = f"messages[{index}]"
        message = mapping(message, place, 'an object with "role" and "content"')
        only(message, {"role", "content"}, place)
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or role not in ROLES:
            raise invalid(f"{place}.role", f"must be one of {', '.join(ROLES)} (got {str(role)[:100]!r})")
        if role == "system":
            made.append(TurnMessage.of(role, joined(content, f"{place}.content", _TEXT, _TEXT_ALONE), place))
            continue
        if not isinstance(content, list | tuple):
            content = [{"type": "text", "text": text_of(content, f"{place}.content")}]
        (_user if role == "user" else _model)(made, content, place)
    for one in made:
        if len(one.texts) > 1:
            one.message["content"] = _BETWEEN.join(filter(None, one.texts))
    return made


def _user(made: list[TurnMessage], blocks: Any, place: str) -> None:
    """Add a user's texts and the outputs of calls, in order."""
    said: list[str] = [] if blocks else [""]
    for index, block in enumerate(blocks):
        where = f"{place}.content[{index}]"
        block = mapping(block, where, "a block, an object with a type")
        if type_of(block, where, _OF_USERS, _TEXT_ALONE) == "text":
            said.append(_text(block, where))
            continue
        _say(made, said, place)
        said = []
        result = _result(block, where)
        made.append(TurnMessage(result, where, [], [result["content"]]))
    _say(made, said, place)


def _say(made: list[TurnMessage], said: list[str], place: str) -> None:
    """Add a user's texts, which may continue the previous turn's."""
    if not said:
        return
    text = "".join(said)
    if made and made[-1].message["role"] == "user":
        made[-1].texts.append(text)
    else:
        made.append(TurnMessage.of("user", text, place))


def _model(made: list[TurnMessage], blocks: Any, place: str) -> None:
    """Add a turn of the model: its reasoning, text and calls."""
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[JsonObject] = []
    places: list[str] = []
    for index, block in enumerate(blocks):
        where = f"{place}.content[{index}]"
        block = mapping(block, where, "a block, an object with a type")
        match type_of(block, where, _OF_THE_MODEL, _TEXT_ALONE):
            case "text":
                texts.append(_text(block, where))
            case "thinking":
                only(block, {"type", "thinking", "signature"}, where)
                thoughts.append(text_of(block.get("thinking"), f"{where}.thinking"))
            case "tool_use":
                calls.append(_call(block, where))
                places.append(where)
    turn = TurnMessage.of("assistant", "".join(texts), place)
    before = made[-1] if made else turn
    if before.message["role"] == "assistant" and before is not turn and not before.calls and not thoughts:
        before.texts.append("".join(texts))
        turn = before
    else:
        made.append(turn)
    if thoughts:
        turn.message["reasoning_content"] = "".join(thoughts)
    if calls:
        turn.message["tool_calls"] = calls
        turn.calls.extend(places)


def _text(block: Mapping[str, Any], where: str) -> str:
    only(block, {"type", "text"}, where, ignored=_NO_EFFECT)
    return text_of(block.get("text"), f"{where}.text")


def _result(block: Mapping[str, Any], where: str) -> JsonObject:
    only(block, {"type", "tool_use_id", "content", "is_error"}, where, ignored=_NO_EFFECT)
    failed = flag_of(block.get("is_error"), f"{where}.is_error", False)
    content = block.get("content")
    text = "" if content is None else joined(content, f"{where}.content", _TEXT, _TEXT_ALONE)
    call_id = text_of(block.get("tool_use_id"), f"{where}.tool_use_id")
    return {"role": "tool", "tool_call_id": call_id, "content": text or ("error" if failed else "")}


def _call(block: Mapping[str, Any], where: str) -> JsonObject:
    only(block, {"type", "id", "name", "input"}, where, ignored=_NO_EFFECT | {"caller", "toolset_name"})
    arguments = mapping(block.get("input", {}), f"{where}.input", "an object")
    call_id, name = (text_of(block.get(key), f"{where}.{key}") for key in ("id", "name"))
    return called(call_id, name, dict(arguments))
