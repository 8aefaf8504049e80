"""The prompt of a row that follows another row, until that row's answer is put into it.

    Rate 1 to 5:
    {{ prior.content }}                   what the row before it answered
    {{ prior.messages }}Now shorten it.   the chat of the row before it, with its answer, goes on

As in any template, what is substituted is data, and is never looked at again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Protocol, Self

from nightmill.jobs.base.contract import JsonObject
from nightmill.jobs.errors import InvalidParameterError, InvalidPromptError, InvalidRequestError, RowCode
from nightmill.jobs.request.prompts import check_messages, check_text
from nightmill.jobs.request.template import PRIOR, Empty, Filter, Slot, Template, write_value

MESSAGES = f"{PRIOR}messages"
_PARTS = ("text", "content", "reasoning", "parsed", "messages")
_PROPERTY = f"{PRIOR}parsed."
_LARGEST = 1 << 24  # characters of a filled prompt, as of a row of a file

Parts = tuple[str | Slot, ...]
"""A text whose slots are to be filled."""


class PriorAnswer(Protocol):
    """The row before a follower, once it has succeeded."""

    def value(self, name: str) -> Any:
        """Return what `prior.NAME` stands for; None if there is none."""

    def chat(self) -> list[JsonObject]:
        """Return its messages with its answer as the last one. Raises InvalidRequestError without a chat."""


@dataclass(frozen=True, kw_only=True)
class Held:
    """A prompt with slots: a plain one, or messages. `continues`: the chat of the row before comes first.

    empty         what becomes of the row if a slot has no value
    columns       columns that come back and are known once the row before has ended, and what of it they are
    seeded        the row's seed was given with it
    realm         whose answers may stand for the row's (`jobs.request.reuse`)
    scheduled_at  the time before which the row may not begin
    """

    prompt: Parts | None = None
    messages: tuple[tuple[JsonObject, Parts], ...] = ()
    continues: bool = False
    empty: Empty = Empty.ERROR
    columns: Mapping[str, str] = field(default_factory=dict)
    seeded: bool = False
    realm: str | None = None
    scheduled_at: datetime | None = None

    def skeleton(self) -> JsonObject:
        """A prompt to check the row with: slots stand as they are written."""
        if self.prompt is not None:
            return {"prompt": _shown(self.prompt)}
        return {"messages": [message | {"content": _shown(parts)} for message, parts in self.messages]}

    def fill(self, prior: PriorAnswer) -> JsonObject:
        """Return the columns `prompt` and `messages`. Raises InvalidRequestError if they cannot be made."""
        if self.prompt is not None:
            return {"prompt": check_text(self._filled(self.prompt, prior)), "messages": None}
        said = [message | {"content": self._filled(parts, prior)} for message, parts in self.messages]
        if self.continues:
            before = prior.chat()
            if before and before[0].get("role") == "system" and said[0]["role"] == "system":
                said = said[1:]  # the chat has one of its own
            system = said[:1] if said and said[0]["role"] == "system" else []
            said = [*system, *before, *said[len(system) :]]
        if sum(len(message["content"]) for message in said) > _LARGEST:
            raise _too_long()
        return {"prompt": None, "messages": check_messages(said)}

    def _filled(self, parts: Parts, prior: PriorAnswer) -> str:
        written: list[str] = []
        left = _LARGEST
        for part in parts:
            text = part if isinstance(part, str) else self._written(part, prior)
            left -= len(text)
            if left < 0:
                raise _too_long()
            written.append(text)
        return "".join(written)

    def _written(self, slot: Slot, prior: PriorAnswer) -> str:
        value = prior.value(slot.column.removeprefix(PRIOR))
        if value is None and self.empty is not Empty.KEEP:
            raise InvalidRequestError(
                f"{slot.column}: the row before it has none, and the template names it; name another part, "
                "or run such rows with nothing there (--empty keep)",
                field=slot.column,
                code=RowCode.MISSING_FIELD,
            )
        return write_value(slot, value, Empty.KEEP)

    def values(self) -> JsonObject:
        """The form that SQL holds, for `read`."""
        said: JsonObject = {}
        if self.prompt is not None:
            said["prompt"] = _stored(self.prompt)
        if self.messages:
            said["messages"] = [message | {"content": _stored(parts)} for message, parts in self.messages]
        if self.empty is Empty.KEEP:
            said["empty"] = str(self.empty)
        if self.columns:
            said["columns"] = dict(self.columns)
        if self.realm is not None:
            said["realm"] = self.realm
        if self.scheduled_at is not None:
            said["scheduled_at"] = self.scheduled_at.isoformat()
        return said | {name: True for name in ("continues", "seeded") if getattr(self, name)}

    @classmethod
    def read(cls, values: Any) -> Self:
        """Read what `values` gave. Raises ValueError, KeyError or TypeError for what it did not."""
        begins = values.get("scheduled_at")
        return cls(
            prompt=_read(values["prompt"]) if "prompt" in values else None,
            messages=tuple(
                ({k: v for k, v in message.items() if k != "content"}, _read(message["content"]))
                for message in values.get("messages", ())
            ),
            continues=values.get("continues") is True,
            empty=Empty(values.get("empty", Empty.ERROR)),
            columns=dict(values.get("columns", {})),
            seeded=values.get("seeded") is True,
            realm=values.get("realm"),
            scheduled_at=None if begins is None else datetime.fromisoformat(begins),
        )


def held_chat(messages: Sequence[tuple[JsonObject, Parts]], empty: Empty = Empty.ERROR) -> Held:
    """Make a held chat; `{{ prior.messages }}` may begin its first message but the system's.

    Raises InvalidRequestError.
    """
    made: list[tuple[JsonObject, Parts]] = []
    continues = False
    first = next((n for n, (message, _) in enumerate(messages) if message.get("role") != "system"), -1)
    for number, (message, parts) in enumerate(messages):
        begins = bool(parts) and isinstance(parts[0], Slot) and parts[0].column == MESSAGES
        if begins and number == first:
            continues = True
            parts = _stripped(parts[1:])
            if not parts or message.get("role") != "user":
                said = f"{MESSAGES}: write the next message of the chat behind it, which is the user's"
                raise InvalidPromptError(said, field=MESSAGES)
        _refuse_chat(parts)
        made.append((message, parts))
    return Held(messages=tuple(made), continues=continues, empty=empty)


def held_text(parts: Parts, empty: Empty = Empty.ERROR) -> Held:
    """Make a held plain prompt. Raises InvalidRequestError."""
    _refuse_chat(parts)
    return Held(prompt=parts, empty=empty)


def parts_of(template: Template, row: Mapping[str, Any], empty: Empty) -> Parts:
    """Fill the columns of a row into a template, and leave what the row before it is to give.

    Raises InvalidRequestError.
    """
    parts = (
        part
        if isinstance(part, str) or part.column.startswith(PRIOR)
        else write_value(part, row.get(part.column), empty)
        for part in template.parts
    )
    return _joined(parts)


def check_slots(template: Template) -> None:
    """Raises InvalidParameterError for parts of a prior that there are not."""
    for slot in template.slots:
        if not slot.column.startswith(PRIOR):
            continue
        name = slot.column.removeprefix(PRIOR)
        if name not in _PARTS and not (slot.column.startswith(_PROPERTY) and slot.column != _PROPERTY):
            known = ", ".join(f"{PRIOR}{part}" for part in _PARTS)
            raise InvalidParameterError(
                f"{template.label}: line {slot.line}, column {slot.place}: there is no {slot.column[:100]}; "
                f"there are {known} and {_PROPERTY}KEY",
                field=template.label,
            )
        if slot.filter is Filter.MESSAGES:
            raise InvalidParameterError(
                f"{template.label}: line {slot.line}, column {slot.place}: write {{{{ {MESSAGES} }}}} for a "
                "chat, and the next message behind it",
                field=template.label,
            )


def _refuse_chat(parts: Parts) -> None:
    if any(isinstance(part, Slot) and part.column == MESSAGES for part in parts):
        raise InvalidPromptError(
            f"{MESSAGES}: must come first in the user's message, and is not for plain prompts; a chat as "
            "text is not supported",
            field=MESSAGES,
        )


def _joined(parts: Any) -> Parts:
    made: list[str | Slot] = []
    for part in parts:
        if isinstance(part, str) and made and isinstance(made[-1], str):
            made[-1] += part
        elif part != "":
            made.append(part)
    return tuple(made)


def _stripped(parts: Parts) -> Parts:
    if parts and isinstance(parts[0], str):
        return _joined((parts[0].lstrip(), *parts[1:]))
    return parts


def _shown(parts: Parts) -> str:
    return "".join(part if isinstance(part, str) else f"{{{{ {part.column} }}}}" for part in parts)


def _stored(parts: Parts) -> list[Any]:
    return [
        part
        if isinstance(part, str)
        else {"prior": part.column.removeprefix(PRIOR)} | ({"json": True} if part.filter else {})
        for part in parts
    ]


def _read(parts: Any) -> Parts:
    return tuple(
        part
        if isinstance(part, str)
        else Slot(PRIOR + part["prior"], Filter.JSON if part.get("json") else Filter.TEXT, 0, 0)
        for part in parts
    )


def _too_long() -> InvalidPromptError:
    return InvalidPromptError(
        f"prompt: has more than {_LARGEST:,} characters with the answer of the row before it; take less",
        field="prompt",
        code=RowCode.TOO_LONG,
    )
