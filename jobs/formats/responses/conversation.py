"""Reconstruction of a conversation up to the end of a response, from its job's row."""

from nightmill.jobs.base.contract import JsonObject
from nightmill.jobs.errors import InvalidRequestError
from nightmill.jobs.formats.jsonlines import LINE_LIMIT
from nightmill.jobs.formats.responses.items import MAX_ITEMS
from nightmill.jobs.formats.shapes import called
from nightmill.jobs.reply.job import Job

FIELD = "previous_response_id"
_BEGIN = "begin a new conversation, with what matters of it as input"


def own_messages(job: Job) -> list[JsonObject]:
    """Return all messages of a response's job except its instructions, which apply to that response only."""
    messages = job.messages or []
    return messages[1:] if (job.request or {}).get("instructions") else messages


def conversation_of(job: Job) -> list[JsonObject]:
    """Return the conversation up to the end of an ended response; raises InvalidRequestError.

    A job's row includes the messages of all earlier responses, so only one row is read, and earlier responses
    may be deleted.
    """
    if not job.state.final:
        raise _bad("names a response that has not ended; wait for it, or cancel it")
    if not job.answers:
        raise _bad("names a response that has no text to go on from; name the one before it")
    reply = job.replies[0]
    said: JsonObject = {"role": "assistant", "content": reply.content}
    if reply.reasoning is not None:
        said["reasoning_content"] = reply.reasoning
    if reply.tool_calls:
        said["tool_calls"] = [called(call.id, call.name, call.arguments) for call in reply.tool_calls]
    return [*own_messages(job), said]


def continued(previous: list[JsonObject], messages: list[JsonObject], instructions: bool) -> list[JsonObject]:
    """Append messages, the first of which may be instructions, to a conversation.

    Raises InvalidRequestError if there are more than a job may have.
    """
    first = messages[:1] if instructions else []
    whole = [*first, *previous, *messages[len(first) :]]
    size = sum(_size(message) for message in whole)
    if len(whole) > MAX_ITEMS or size > LINE_LIMIT:
        said = f"the conversation has {len(whole):,} messages of {size:,} characters, more than "
        raise _bad(f"{said}{MAX_ITEMS:,} or {LINE_LIMIT:,}: {_BEGIN}")
    return whole


def _size(message: JsonObject) -> int:
    """Return the number of characters in a message's texts."""
    calls = message.get("tool_calls") or ()
    return (
        len(message.get("content") or "")
        + len(message.get("reasoning_content") or "")
        + sum(len(call["function"]["name"]) + len(call["function"]["arguments"]) for call in calls)
    )


def _bad(said: str) -> InvalidRequestError:
    return InvalidRequestError(f"{FIELD}: {said}", field=FIELD)
