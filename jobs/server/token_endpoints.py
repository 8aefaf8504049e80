"""POST /tokenize and /detokenize and GET /tokenizer_info, in the shapes of vLLM's server."""

from dataclasses import dataclass, replace
from typing import Self

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from nightmill.jobs.base.contract import JsonObject
from nightmill.jobs.errors import InvalidRequestError
from nightmill.jobs.formats.rows import missing
from nightmill.jobs.request.fields import unknown_field
from nightmill.jobs.request.prompts import check_token_ids, json_type
from nightmill.jobs.request.spec import JobSpec
from nightmill.jobs.server.errors import invalid
from nightmill.jobs.server.job_service import JobService
from nightmill.jobs.server.tokenizing import Tokenizing

_OF_CHATS = (
    "messages", "add_generation_prompt", "continue_final_message", "reasoning_effort",
    "chat_template_kwargs", "tools",
)  # fmt: skip
TOKENIZE = frozenset({"model", "prompt", "add_special_tokens", "return_token_strs", *_OF_CHATS})
"""Keys of a body of /tokenize."""
DETOKENIZE = frozenset({"model", "tokens"})
"""Keys of a body of /detokenize."""


@dataclass(frozen=True, slots=True)
class TokenizeBody:
    """A parsed body of /tokenize."""

    spec: JobSpec
    special: bool
    texts: bool

    @classmethod
    def read(cls, body: JsonObject) -> Self:
        """Parse a body; raises HttpError and InvalidRequestError, which name the key."""
        given = _known(body, TOKENIZE)
        special, texts = (_flag(given, name) for name in ("add_special_tokens", "return_token_strs"))
        if "prompt" in given and not isinstance(given["prompt"], str):
            raise invalid("prompt", f"must be a text, not {json_type(given['prompt'])}")
        if "prompt" in given and (foreign := next((name for name in _OF_CHATS[1:] if name in given), None)):
            raise invalid(foreign, "is for chats; give messages, or remove it")
        if given.get("prompt") == "":  # not allowed in a job, but it has tokens: none, or BOS
            spec = replace(JobSpec.defaults({"model": given.get("model")}), text="")
        else:
            spec = JobSpec.parse(given)
        return cls(spec, special is not False, bool(texts))


class TokenEndpoints:
    """The three endpoints."""

    def __init__(self, service: JobService, tokenizing: Tokenizing) -> None:
        self._service = service
        self._tokenizing = tokenizing

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize: return the tokens of a prompt or chat for the model."""
        caller = self._service.keys.caller(request)
        asked = await self._service.bodies.read(request, caller.name, TokenizeBody.read)
        served = await self._tokenizing.served(asked.spec.model)
        found = await self._tokenizing.encode(
            served, asked.spec, caller.name, special=asked.special, ids=True, texts=asked.texts
        )
        return JSONResponse(
            {
                "count": found["count"],
                "max_model_len": served.context_length,
                "tokens": found["tokens"],
                "token_strs": found.get("token_strs"),
            }
        )

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize: return the text of tokens."""
        caller = self._service.keys.caller(request)
        model, token_ids = await self._service.bodies.read(request, caller.name, _tokens)
        served = await self._tokenizing.served(model)
        return JSONResponse({"prompt": await self._tokenizing.decode(served, token_ids, caller.name)})

    async def info(self, request: Request) -> Response:
        """GET /tokenizer_info: return special tokens and chat template of a model, `?model=` if several."""
        caller = self._service.keys.caller(request)
        served = await self._tokenizing.served(request.query_params.get("model"))
        facts = await self._tokenizing.facts(served, caller.name)
        return JSONResponse(
            {"tokenizer_class": "GGUF", "model_max_length": served.context_length, "pad_token": None} | facts
        )


def _tokens(body: JsonObject) -> tuple[str | None, list[int]]:
    """Parse the model and token ids of a body of /detokenize."""
    given = _known(body, DETOKENIZE)
    tokens = given.get("tokens")
    if tokens is None:
        raise missing("tokens", "/detokenize needs it")
    if not isinstance(tokens, list):
        raise invalid("tokens", f"must be a list of token ids, not {json_type(tokens)}")
    model = JobSpec.defaults({"model": given.get("model")}).model
    try:
        return model, check_token_ids(tokens)
    except InvalidRequestError as error:
        raise error.renamed(str(error.field).replace("prompt", "tokens", 1)) from None


def _known(body: JsonObject, known: frozenset[str]) -> JsonObject:
    """Return a body without nulls; raises InvalidParameterError for an unknown key."""
    for name in body:
        if name not in known:
            raise unknown_field(name, known)
    return {name: value for name, value in body.items() if value is not None}


def _flag(given: JsonObject, name: str) -> bool | None:
    """Take a flag out of a body; None if it is absent."""
    value = given.pop(name, None)
    if value is not None and not isinstance(value, bool):
        raise invalid(name, f"must be true or false, not {json_type(value)}")
    return value
