"""The checked description of a job. Every interface parses requests into `JobSpec`."""

import hashlib
import json
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Self

from nightmill.jobs.base.contract import (
    AS_USUAL,
    HELD_UNTIL,
    Constrained,
    ConstraintKind,
    JobState,
    JsonObject,
    Prompt,
    Rendering,
    Tools,
)
from nightmill.jobs.errors import InvalidParameterError, InvalidPromptError, RowCode
from nightmill.jobs.request.effort import effort_variables
from nightmill.jobs.request.fields import (
    FIELDS,
    INTERACTIVE,
    PARAMETERS,
    Options,
    check_option,
    moment,
    unknown_field,
)
from nightmill.jobs.request.following import Held
from nightmill.jobs.request.parameters import DEFAULTS, MAX_SEED, GenerationParams
from nightmill.jobs.request.prompts import check_messages, check_text, check_token_ids, is_id, json_type
from nightmill.jobs.request.reuse import content_key, realm_of
from nightmill.jobs.request.stored_parameters import stored
from nightmill.jobs.request.structured import CONSTRAINT_FIELDS, constrained_by
from nightmill.jobs.request.tools import TOOL_KEYS, tools_by


@dataclass(frozen=True, kw_only=True)
class JobSpec(Options):
    """A checked description of a job, or, without a prompt, the defaults of other jobs."""

    text: str | None = None
    messages: list[JsonObject] | None = None
    token_ids: list[int] | None = None
    params: GenerationParams = DEFAULTS
    tooling: Mapping[str, Any] = field(default_factory=dict)
    """The keywords about tools as given, by TOOL_KEYS; `tools` is parsed from them."""
    tools: Tools | None = None
    constrained: Constrained | None = None
    """The constraint, from whichever of CONSTRAINT_FIELDS was given."""
    request: JsonObject | None = None
    """Parts of a request to /v1/responses that its answer repeats (`jobs.formats.responses`), or the encoding
    of one to /v1/embeddings."""
    held: Held | None = None
    """The prompt of a row that follows another, until that one's answer is put into it."""
    after: str | None = None
    """The custom_id of that other row, if it is one of the same file."""
    asker: str | None = None
    """The name of the key that it came with over HTTP."""

    @classmethod
    def defaults(cls, settings: Mapping[str, Any], known: Iterable[str] = ()) -> Self:
        """Make the defaults of jobs from settings; raises InvalidParameterError.

        known  the allowed fields; empty: all
        """
        allowed = frozenset(known) or FIELDS.keys()
        if foreign := [name for name in settings if name not in allowed]:
            raise unknown_field(foreign[0], allowed)
        return cls().updated(settings)

    @classmethod
    def parse(cls, item: "Prompt | Mapping[str, Any]", defaults: "JobSpec | None" = None) -> "JobSpec":
        """Parse a prompt, or a mapping with `prompt` or `messages` and further fields, over `defaults`.

        A prompt is a text, a list of token ids, or a list of messages.

        None counts as not given. Raises InvalidPromptError and InvalidParameterError, which name the field.
        """
        base = defaults or cls()
        if isinstance(item, str) or not isinstance(item, Mapping):
            return base._replace(_prompt(item))._checked()
        values = {name: value for name, value in item.items() if value is not None}
        if isinstance(values.get("embed"), str | list | tuple):
            if "prompt" in values or "messages" in values:
                raise InvalidPromptError(
                    "embed: is the text itself; give no other prompt, or embed: true beside one",
                    field="embed",
                )
            values |= {"prompt": values["embed"], "embed": True}
        prompt, messages = values.pop("prompt", None), values.pop("messages", None)
        if prompt is not None and messages is not None:
            raise InvalidPromptError("prompt: give either prompt or messages, not both", field="prompt")
        if prompt is None and messages is None:
            raise InvalidPromptError(
                "prompt: is missing; give a prompt (a text) or messages (a list)",
                field="prompt",
                code=RowCode.MISSING_FIELD,
            )
        said = _prompt(prompt) if messages is None else {"text": None, "messages": check_messages(messages)}
        return (base.updated(values, said) if values else base._replace(said))._checked()

    def prompted(self, prompt: Prompt) -> Self:
        """Return a copy with another prompt; raises InvalidPromptError and InvalidParameterError."""
        nothing = {"text": None, "token_ids": None, "messages": None}
        return self._replace(nothing | _prompt(prompt))._checked()

    @property
    def prompt(self) -> Prompt | None:
        """The text, the token ids, or the messages."""
        prompts = (prompt for prompt in (self.text, self.token_ids, self.messages) if prompt is not None)
        return next(prompts, None)

    @property
    def rendering(self) -> Rendering | None:
        """The options for rendering the messages; None if they are the defaults, or if the prompt is not a
        chat."""
        if self.messages is None:
            return None
        if not (
            self.continue_final_message
            or self.tools
            or self.chat_template_kwargs
            or self.add_generation_prompt is not None
            or self.reasoning_effort is not None
        ):
            return None  # as of most rows
        continues = self.continue_final_message
        opens = not continues if self.add_generation_prompt is None else self.add_generation_prompt
        variables = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            variables = effort_variables(self.reasoning_effort) | variables
        rendering = Rendering(variables, opens, continues, self.tools)
        return None if rendering == AS_USUAL else rendering

    def row(self, job_id: str, now: datetime, default_attempts: int) -> dict[str, Any]:
        """Return the queued row for the table `jobs`. Draws a seed unless one is given.

        All rows have the same keys, so that one statement can insert many. Raises InvalidParameterError for a
        time beyond the calendar.
        """
        params, rendering, held = self.params, self.rendering, self.held
        begins = moment("scheduled_at", self.scheduled_at, now)
        content = {
            "prompt": self.text if held is None else None,
            "prompt_ids": self.token_ids,
            "messages": self.messages if held is None else None,
            "rendering": None if rendering is None else rendering.values(),
            "params": stored(params),
            "constrained": None if self.constrained is None else self.constrained.values(),
        }
        return {
            "id": job_id,
            "batch": self.batch,
            "custom_id": self.custom_id,
            "model": self.model,
            **content,
            "reuse": self.reuse,
            "content_key": None
            if held is not None or self.reuse is None  # or it has no content yet
            else content_key(self.reuse, content, params.seed, realm_of(self.asker)),
            "answers": params.answers,
            "request": self.request,
            "seed": secrets.randbits(MAX_SEED.bit_length()) if params.seed is None else params.seed,
            "state": JobState.QUEUED.value,
            "attempt": 0,
            "failures": 0,
            "max_attempts": self.max_attempts or default_attempts,
            "priority": self.priority,
            "prior": None,
            "held": None
            if held is None
            else replace(
                held,
                seeded=params.seed is not None,
                realm=realm_of(self.asker) if self.reuse else None,
                scheduled_at=begins,
            ).values(),
            # The message is sent right after the commit. For a scheduled job, a worker's sweep sends it
            # later.
            "sent_at": None if self.scheduled_at is not None or held is not None else now,
            "idempotency_key": self.idempotency_key,
            "fingerprint": self._fingerprint() if self.idempotency_key else None,
            "metadata": dict(self.metadata) if self.metadata else None,
            "created_at": now,
            "scheduled_at": begins if held is None else HELD_UNTIL,
            "deadline_at": moment("deadline", self.deadline, now),
        }

    def following(self, held: Held, after: str | None = None) -> Self:
        """Return a copy whose prompt is `held` until the row before it, `after`, has ended."""
        return self._replace({"held": held, "after": after})

    def for_request(self, request: JsonObject) -> Self:
        """Return a copy that keeps these parts of a request over HTTP, for its answer."""
        return self._replace({"request": request})

    def as_interactive(self) -> Self:
        """Return a copy with the interactive priority, which a later `updated` may override."""
        return self._replace({"priority": INTERACTIVE})

    def updated(self, settings: Mapping[str, Any], said: Mapping[str, Any] | None = None) -> Self:
        """Return a copy with these fields changed; `said` is checked already. Raises
        InvalidParameterError."""
        params: dict[str, Any] = {}
        forms: dict[str, Any] = {}
        tooling: dict[str, Any] = {}
        others = dict(said or {})
        for name, value in settings.items():
            if value is None:
                continue
            if name in PARAMETERS:
                params[name] = value
            elif name in CONSTRAINT_FIELDS:
                forms[name] = value
            elif name in TOOL_KEYS:
                tooling[name] = value
            else:
                check_option(name, value)
                others[name] = value
        if (effort := settings.get("reasoning_effort")) is not None and "max_reasoning_tokens" not in params:
            # A template that knows no switch lets its model reason all the same: so there is a budget, too.
            if effort == "none":
                params["max_reasoning_tokens"] = 0
            elif self.reasoning_effort == "none" and self.params.max_reasoning_tokens == 0:
                params["max_reasoning_tokens"] = None
        if params:
            others["params"] = GenerationParams.parse(vars(self.params) | params)
        if forms:
            others["constrained"] = constrained_by(forms)
        if tooling:
            others["tooling"] = said_of_tools = {**self.tooling, **tooling}
            others["tools"] = tools_by(said_of_tools)
        spec = self._replace(others)
        if spec.params.ignore_eos and (spec.constrained or (spec.tools and spec.tools.required)):
            raise InvalidParameterError(
                "ignore_eos: contradicts the constraint, which says where the answer ends; give one of them",
                field="ignore_eos",
            )
        return spec

    def _replace(self, values: Mapping[str, Any]) -> Self:
        """Return a copy with these attributes; `dataclasses.replace` takes ten times as long, and a batch may
        have 100,000 rows."""
        copy = object.__new__(type(self))
        vars(copy).update(vars(self), **values)
        return copy

    def _checked(self) -> Self:
        """Return the spec if its fields are consistent with its prompt; raises InvalidRequestError."""
        if self.tools is not None and self.tools.required and self.constrained is not None:
            # A required call is constrained completely by the tools. Clients ask for both to be sure of one.
            return self._replace({"constrained": None})._checked()
        if self.params.echo and self.messages is not None:
            raise InvalidParameterError(
                "echo: is for plain prompts: a chat is no text to begin an answer with; remove it",
                field="echo",
            )
        if self.params.score and self.constrained is not None:
            raise InvalidParameterError(
                "score: contradicts the constraint, since nothing is generated; give one of them",
                field="score",
            )
        if self.params.embed:
            self._check_embedding()
        if self.params.rerank is not None:
            self._check_document()
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

    def _check_document(self) -> None:
        if self.text is None and self.held is None:
            raise InvalidPromptError(
                "rerank: is for documents that are plain texts: give the document as prompt", field="prompt"
            )
        if self.constrained is not None or self.tools is not None:
            name = "tools" if self.constrained is None else "rerank"
            raise InvalidParameterError(
                f"{name}: a relevance is no answer that could obey a constraint or call tools; give one",
                field=name,
            )

    def _check_embedding(self) -> None:
        if self.messages is not None:
            raise InvalidPromptError(
                "embed: is for plain texts and token ids, not for chats; give the text", field="embed"
            )
        if self.constrained is not None or self.tools is not None:
            name = "tools" if self.constrained is None else "embed"
            raise InvalidParameterError(
                f"{name}: an embedding has no answer that could obey a constraint or call tools; give one of "
                "them",
                field=name,
            )

    def _check_tools(self) -> None:
        if self.messages is None:
            raise InvalidParameterError(
                "tools: are for chats, whose template tells the model of them; give messages",
                field="tools",
            )
        if self.constrained is not None and self.constrained.kind is ConstraintKind.GRAMMAR:
            raise InvalidParameterError(
                "tools: contradict grammar, which would have to say how calls are written; give one of them, "
                'json_schema, regex or choice in place of the grammar, or tool_choice "none" or "required"',
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
            "params": stored(self.params) | {"seed": self.params.seed},
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
    if not isinstance(prompt, list) and (
        isinstance(prompt, bytes | Mapping) or not isinstance(prompt, Iterable)
    ):
        raise InvalidPromptError(
            f"prompt: must be a text, a list of messages or of token ids, not {type(prompt).__name__}",
            field="prompt",
        )
    items = list(prompt)
    if not items:
        raise InvalidPromptError("prompt: is empty", field="prompt")
    if is_id(items[0]):
        return {"text": None, "token_ids": check_token_ids(items)}
    if not isinstance(items[0], dict | Mapping):
        said = f"prompt[0]: must be a token id (a whole number) or a message, not {json_type(items[0])}"
        raise InvalidPromptError(said, field="prompt[0]")
    return {"text": None, "messages": check_messages(items)}
