"""Plain rows: `prompt` or `messages`, with the keywords of enqueue; `after` names a row that it follows."""

from nightmill.jobs.base.contract import JsonObject
from nightmill.jobs.errors import InvalidParameterError, InvalidPromptError
from nightmill.jobs.request.fields import FIELDS, check_option, unknown_field
from nightmill.jobs.request.following import Parts, check_slots, held_chat, held_text, parts_of
from nightmill.jobs.request.prompts import check_messages, check_text
from nightmill.jobs.request.spec import JobSpec
from nightmill.jobs.request.template import PRIOR, Empty, Template

# Fields of the whole batch, which a row may not set.
_OF_THE_BATCH = {
    "batch": "the whole file is one batch: name it when you submit it",
    "deadline": "it is given for the whole batch, when you submit it",
    "scheduled_at": "it is given for the whole batch, when you submit it",
    "idempotency_key": "in a batch, custom_id has its part",
}
AFTER = "after"
_ASKS = ("prompt", "messages", "embed")
_NO_PROMPT = "the row has no prompt or messages; rows of a table take a template, as --template TEXT"
ROW_KEYS = frozenset(FIELDS.keys() - _OF_THE_BATCH.keys() | {"prompt", "messages", AFTER})
"""Keys of a row."""


def plain_job(values: JsonObject, defaults: JobSpec) -> JobSpec:
    """Parse a plain row; raises InvalidRequestError."""
    for name, value in values.items():
        if name not in ROW_KEYS and value is not None:
            asks = any(values.get(ask) is not None for ask in _ASKS)
            raise unknown_field(
                name, ROW_KEYS, _OF_THE_BATCH.get(name), otherwise=None if asks else _NO_PROMPT
            )
    if values.get(AFTER) is not None:
        return _follower(values, defaults)
    return JobSpec.parse({name: value for name, value in values.items() if name != AFTER}, defaults)


def _follower(values: JsonObject, defaults: JobSpec) -> JobSpec:
    """Parse a row that follows another: its texts are templates over that one's answer."""
    more = dict(values)
    after, prompt, messages = more.pop(AFTER), more.pop("prompt", None), more.pop("messages", None)
    check_option("custom_id", after, AFTER)
    if (prompt is None) is (messages is None):
        return JobSpec.parse(values, defaults)  # says what is wrong
    if messages is not None:
        held = held_chat(
            [_message(message, number) for number, message in enumerate(check_messages(messages))]
        )
    elif isinstance(prompt, str):
        held = held_text(_parts(check_text(prompt), "prompt"))
    else:
        raise InvalidPromptError(
            "prompt: of a row with after must be a text; or give messages", field="prompt"
        )
    return JobSpec.parse(more | held.skeleton(), defaults).following(held, after)


def _message(message: JsonObject, number: int) -> tuple[JsonObject, Parts]:
    role_and_more = {name: value for name, value in message.items() if name != "content"}
    return role_and_more, _parts(message["content"], f"messages[{number}].content")


def _parts(text: str, label: str) -> Parts:
    if not text.strip():
        return (text,)
    template = Template.parse(text, label)
    check_slots(template)
    for slot in template.slots:
        if not slot.column.startswith(PRIOR):
            raise InvalidParameterError(
                f"{label}: line {slot.line}, column {slot.place}: {{{{ {slot.column[:100]} }}}} stands for "
                "nothing: in a row with after, write {{ prior.content }} for that row's answer",
                field=label,
            )
    return parts_of(template, {}, Empty.ERROR)
