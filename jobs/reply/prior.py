"""The parts of a prior's answer that a row which follows it may use."""

from dataclasses import dataclass
from typing import Any

from nightmill.jobs.base.contract import JsonObject
from nightmill.jobs.errors import InvalidPromptError
from nightmill.jobs.reply.job import Job

_PROPERTY, _COLUMN = "parsed.", "column."


@dataclass(frozen=True, slots=True)
class JobBefore:
    """A succeeded job, as `jobs.request.following` wants it."""

    job: Job

    def value(self, name: str) -> Any:
        """Return the part of the first answer of this name; None if there is none."""
        job = self.job
        if name.startswith(_PROPERTY):
            parsed = job.parsed
            return parsed.get(name.removeprefix(_PROPERTY)) if isinstance(parsed, dict) else None
        if name.startswith(_COLUMN):
            return job.metadata.get(name.removeprefix(_COLUMN))
        if name == "parsed":
            return job.parsed
        values = {"text": job.text, "content": job.content, "reasoning": job.reasoning}
        return values[name]

    def chat(self) -> list[JsonObject]:
        """Return the chat, with the answer as the assistant's message. Raises InvalidPromptError."""
        job = self.job
        if job.messages is None:
            raise InvalidPromptError(
                "prior.messages: the row before it is a plain prompt, and not a chat; take prior.text",
                field="prior.messages",
            )
        if not job.replies:
            raise InvalidPromptError(
                "prior.messages: the row before it has no text, only an embedding", field="prior.messages"
            )
        reply = job.replies[0]
        said: JsonObject = {"role": "assistant", "content": reply.content}
        if reply.tool_calls:
            said["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in reply.tool_calls
            ]
        continued = job.rendering is not None and job.rendering.continue_final_message
        if continued and job.messages[-1]["role"] == "assistant":
            begun = job.messages[-1]
            return [*job.messages[:-1], begun | said | {"content": begun["content"] + reply.content}]
        return [*job.messages, said]
