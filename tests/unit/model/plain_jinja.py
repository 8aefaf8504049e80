"""Chat templates as plain Jinja renders them, set up as transformers does it, and chats for them."""

import json
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tests.unit.model.conftest import DOWNLOADED

TEMPLATES = sorted(path.name for path in (DOWNLOADED / "templates").glob("*.jinja"))
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather <now> & 'here'",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string", "description": "Zürich"}},
            "required": ["place"],
        },
    },
}


def said(*turns: tuple[str, Any]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in turns]


CHATS = [
    said(("user", "Hello")),
    said(("system", "Be brief."), ("user", 'Hi "there" <b> & ü 🦙 {{ x }} {% y %}')),
    said(("user", "1+1?"), ("assistant", "2"), ("user", "and\n 2+2? ")),
    said(
        ("system", "  You count.\n"), ("user", "a"), ("assistant", " b\n"), ("user", ""), ("assistant", "d")
    ),
    said(("user", "q"), ("assistant", "<think>\nhm\n</think>\n\nyes"), ("user", "r")),
    said(("user", [{"type": "text", "text": "a part"}])),
    said(("developer", "as you like"), ("user", "x")),
    said(("user", "a"), ("user", "b")),  # these some templates refuse
    said(("assistant", "x"), ("tool", "y")),
    said(("system", "alone")),
    [],
]


class Generation(Extension):
    """`{% generation %}` as transformers has it: a block whose text it keeps."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's name and type

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_keep"), [], [], body).set_lineno(line)

    def _keep(self, caller: Callable[[], str]) -> str:
        return caller()


def plain_jinja() -> ImmutableSandboxedEnvironment:
    def refuse(message: str) -> NoReturn:
        raise TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    jinja = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    jinja.filters["tojson"] = to_json
    jinja.globals["raise_exception"] = refuse
    jinja.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    return jinja


def plainly(source: str, variables: dict[str, Any], chats: Sequence[dict[str, Any]]) -> list[str | None]:
    template = plain_jinja().from_string(source)

    def text(chat: dict[str, Any]) -> str | None:
        try:
            return template.render(**variables, **chat)
        except Exception:  # templates raise what they like; the renderer, too, then gives no text
            return None

    return [text(chat) for chat in chats]
