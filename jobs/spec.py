"""A job as it is asked for: every door parses into `JobSpec`, which makes every check of enqueue."""

import hashlib
import json
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Self

from nightmill.jobs.constrained import FORMS, constrained_by
from nightmill.jobs.contract import AS_USUAL, Constrained, JobState, JsonObject, Prompt, Rendering, Tools
from nightmill.jobs.errors import InvalidParameterError, InvalidPromptError, RowCode
from nightmill.jobs.fields import (
    FIELDS,
    INTERACTIVE,
    PARAMETERS,
    Options,
    check_option,
    moment,
    unknown_field,
)
from nightmill.jobs.parameters import DEFAULTS, MAX_SEED, GenerationParams
from nightmill.jobs.prompts import check_messages, check_text, check_token_ids, is_id, json_type
from nightmill.jobs.tools import TOOL_KEYS, tools_by


@dataclass(frozen=True, kw_only=True)
class JobSpec(Options):
    """What is said about a job. One without a prompt holds the defaults of others."""

    text: str | None = None
    messages: list[JsonObject] | None = None
    token_ids: list[int] | None = None
    params: GenerationParams = DEFAULTS
    tooling: Mapping[str, Any] = field(default_factory=dict)
    """What was said about tools, by TOOL_KEYS, and what follows from it:"""
    tools: Tools | None = None
    constrained: Constrained | None = None
    """What the answer must be, in whichever of FORMS it was said."""

    @classmethod
    def defaults(cls, settings: Mapping[str, Any], known: Iterable[str] = ()) -> Self:
        """What holds for jobs that do not say otherwise; raises InvalidParameterError.

        known  the fields that may be given, if not all
        """
        allowed = frozenset(known) or FIELDS.keys()
        if foreign := [name for name in settings if name not in allowed]:
            raise unknown_field(foreign[0], allowed)
        return cls().updated(settings)

    @classmethod
    def parse(cls, item: "Prompt | Mapping[str, Any]", defaults: "JobSpec | None" = None) -> "JobSpec":
        """A prompt, or a mapping with `prompt` or `messages` and fields of its own, over `defaults`.

        A prompt is a text, a list of token ids, or a list of messages.

        None counts as not given. Raises InvalidPromptError and InvalidParameterError, which name the field.
        """
        base = defaults or cls()
        if isinstance(item, str) or not isinstance(item, Mapping):
            return base._but(_prompt(item))._checked()
        given = {name: value for name, value in item.items() if value is not None}
        prompt, messages = given.pop("prompt", None), given.pop("messages", None)
        if prompt is not None and messages is not None:
            raise InvalidPromptError("prompt: give either prompt or messages, not both", field="prompt")
        if prompt is None and messages is None:
            raise InvalidPromptError(
                "prompt: is missing; give a prompt (a text) or messages (a list)",
                field="prompt",
                code=RowCode.MISSING_FIELD,
            )
        said = _prompt(prompt) if messages is None else {"text": None, "messages": check_messages(messages)}
        return (base.updated(given, said) if given else base._but(said))._checked()

    @property
    def prompt(self) -> Prompt | None:
        """The text, the token ids, or the messages."""
        given = (said for said in (self.text, self.token_ids, self.messages) if said is not None)
        return next(given, None)

    @property
    def rendering(self) -> Rendering | None:
        """How the messages become a prompt, unless that is as usual. It says nothing of other prompts."""
        if self.messages is None:
            return None
        continues = self.continue_final_message
        opens = not continues if self.add_generation_prompt is None else self.add_generation_prompt
        made = Rendering(dict(self.chat_template_kwargs or {}), opens, continues, self.tools)
        return None if made == AS_USUAL else made

    def row(self, job_id: str, now: datetime, default_attempts: int) -> dict[str, Any]:
        """The row of `jobs`, queued. Draws a seed unless one is given.

        Every row has the same keys, so that many can go into one statement. Raises InvalidParameterError for
        a time beyond the calendar.
        """
        params, rendering = self.params, self.rendering
        return {
            "id": job_id,
            "batch": self.batch,
            "custom_id": self.custom_id,
            "model": self.model,
            "prompt": self.text,
            "prompt_ids": self.token_ids,
            "messages": self.messages,
            "rendering": None if rendering is None else rendering.values(),
            "params": params.stored(),
            "constrained": None if self.constrained is None else self.constrained.values(),
            "seed": secrets.randbits(MAX_SEED.bit_length()) if params.seed is None else params.seed,
            "state": JobState.QUEUED.value,
            "attempt": 0,
            "failures": 0,
            "max_attempts": self.max_attempts or default_attempts,
            "priority": self.priority,
            # Sent with the commit that makes the row visible. A job for later is sent by a worker's sweep.
            "sent_at": None if self.scheduled_at is not None else now,
            "idempotency_key": self.idempotency_key,
            "fingerprint": self._fingerprint() if self.idempotency_key else None,
            "metadata": dict(self.metadata) if self.metadata else None,
            "created_at": now,
            "scheduled_at": moment("scheduled_at", self.scheduled_at, now),
            "deadline_at": moment("deadline", self.deadline, now),
        }

    def waited_for(self) -> Self:
        """Interactive, unless it is told another priority afterwards."""
        return self._but({"priority": INTERACTIVE})

    def updated(self, settings: Mapping[str, Any], said: Mapping[str, Any] | None = None) -> Self:
        """With these fields in place of its own; `said` is checked already. Raises InvalidParameterError."""
        params: dict[str, Any] = {}
        forms: dict[str, Any] = {}
        tooling: dict[str, Any] = {}
        others = dict(said or {})
        for name, value in settings.items():
            if value is None:
                continue
            if name in PARAMETERS:
                params[name] = value
            elif name in FORMS:
                forms[name] = value
            elif name in TOOL_KEYS:
                tooling[name] = value
            else:
                check_option(name, value)
                others[name] = value
        if params:
            others["params"] = GenerationParams.parse(vars(self.params) | params)
        if forms:
            others["constrained"] = constrained_by(forms)
        if tooling:
            others["tooling"] = said_of_tools = {**self.tooling, **tooling}
            others["tools"] = tools_by(said_of_tools)
        made = self._but(others)
        if made.params.ignore_eos and (made.constrained or (made.tools and made.tools.required)):
            raise InvalidParameterError(
                "ignore_eos: contradicts what the answer must be, which says where it ends; give one of them",
                field="ignore_eos",
            )
        return made

    def _but(self, values: Mapping[str, Any]) -> Self:
        """With other values; `dataclasses.replace` takes ten times as long, and a night has 100,000 rows."""
        made = object.__new__(type(self))
        vars(made).update(vars(self), **values)
        return made

    def _checked(self) -> Self:
        """Itself, if what it says goes together with its prompt; raises InvalidRequestError."""
        if self.params.echo and self.messages is not None:
            raise InvalidParameterError(
                "echo: is for plain prompts: a chat is no text to begin an answer with; remove it",
                field="echo",
            )
        if self.params.score and self.constrained is not None:
            raise InvalidParameterError(
                "score: contradicts what the answer must be, since nothing is generated; give one of them",
                field="score",
            )
        if self.tools is not None:
            self._check_tools()
        if not self.continue_final_message or self.messages is None:
            return self
        if self.add_generation_prompt:
            raise InvalidParameterError(
                "add_generation_prompt: contradicts continue_final_message, which opens no other message; "
                "give one of them",
                field="add_generation_prompt",
            )
        if (role := self.messages[-1]["role"]) != "assistant":
            raise InvalidParameterError(
                f"continue_final_message: the last message must be the assistant's, not the {role}'s: "
                "add one with what the answer begins with",
                field="continue_final_message",
            )
        return self

    def _check_tools(self) -> None:
        if self.messages is None:
            raise InvalidParameterError(
                "tools: are for chats, whose template tells the model of them; give messages",
                field="tools",
            )
        if self.constrained is not None:
            raise InvalidParameterError(
                "tools: contradict what the answer must be, which leaves no room for a call; give one of "
                'them, or tool_choice "none"',
                field="tools",
            )
        if self.continue_final_message:
            raise InvalidParameterError(
                "tools: contradict continue_final_message, whose answer begins in the middle of a message; "
                "give one of them",
                field="tools",
            )

    def _fingerprint(self) -> str:
        content: dict[str, Any] = {
            "prompt": self.text,
            "messages": self.messages,
            "params": self.params.stored() | {"seed": self.params.seed},
            "model": self.model,
        }
        if self.constrained is not None:
            content["constrained"] = self.constrained.values()
        if self.token_ids is not None:
            content["prompt_ids"] = self.token_ids
        if (rendering := self.rendering) is not None:
            content["rendering"] = rendering.values()
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _prompt(prompt: Any) -> dict[str, Any]:
    if isinstance(prompt, str):
        return {"text": check_text(prompt), "messages": None}
    if isinstance(prompt, bytes | Mapping) or not isinstance(prompt, Iterable):
        raise InvalidPromptError(
            f"prompt: must be a text, a list of messages or of token ids, not {type(prompt).__name__}",
            field="prompt",
        )
    items = list(prompt)
    if not items:
        raise InvalidPromptError("prompt: is empty", field="prompt")
    if is_id(items[0]):
        return {"text": None, "token_ids": check_token_ids(items)}
    if not isinstance(items[0], Mapping):
        said = f"prompt[0]: must be a token id (a whole number) or a message, not {json_type(items[0])}"
        raise InvalidPromptError(said, field="prompt[0]")
    return {"text": None, "messages": check_messages(items)}
