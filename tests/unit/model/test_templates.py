"""Templates give the text that plain Jinja gives, set up as transformers does it."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from nightmill.worker.model.chat.renderer import Limits, Renderer
from tests.support.needs import Need, missing
from tests.support.thinning import thinned
from tests.unit.model.conftest import DOWNLOADED
from tests.unit.model.plain_jinja import CHATS, TEMPLATES, WEATHER, plainly

pytestmark = pytest.mark.heavy


# Each shows what templates use of Jinja, and what comes out for the third chat.
FEATURES = {
    "blocks leave no lines behind": (
        "{% for m in messages %}\n  {% if m.role == 'user' %}\nU: {{ m.content }}\n  {% endif %}\n"
        "{% endfor %}\nend\n",
        "U: 1+1?\nU: and\n 2+2? \nend",
    ),
    "white space is cut at minus and kept at plus": (
        "a {%- if true -%} b {% endif %}\n  {%+ if true %}c{% endif +%}\nd{# e -#}  f {{- 'g' -}} h",
        "ab   c\ndfgh",
    ),
    "loops break and go on": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% continue %}{% endif %}{{ loop.index }}"
        "{% if loop.last %}{% break %}{% endif %},{% endfor %}",
        "1,3",
    ),
    "loops know where they are": (
        "{% for m in messages %}{{ loop.index0 }}{{ loop.first }}{{ loop.previtem.role if not loop.first }}"
        "{{ loop.nextitem.content if loop.nextitem is defined else '-' }};{% else %}none{% endfor %}",
        "0True2;1Falseuserand\n 2+2? ;2Falseassistant-;",
    ),
    "names outlive a loop": (
        "{% set ns = namespace(n=0, last='') %}{% for m in messages %}"
        "{% set ns.n = ns.n + m.content | length %}{% set ns.last = m.role %}{% endfor %}"
        "{{ ns.n }}{{ ns.last }}",
        "15user",
    ),
    "macros and captured blocks": (
        "{% macro turn(m, end='.') %}[{{ m.role }}{{ end }}]{{ caller() if caller }}{% endmacro %}"
        "{% set all %}{% for m in messages %}{{ turn(m) }}{% endfor %}{% endset %}{{ all | upper }}"
        "{% call turn(messages[0], end='!') %}x{% endcall %}",
        "[USER.][ASSISTANT.][USER.][user!]x",
    ),
    "slices and methods of texts": (
        "{{ messages[::-1][0].content.strip().split('\\n')[-1] }}{{ messages[1:] | length }}"
        "{{ messages[-1]['content'][:3].startswith('an') }}{{ 'a-b'.replace('-', '+').title() }}",
        " 2+2?2TrueA+B",
    ),
    "filters on lists": (
        "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | map('trim')"
        " | join('|') }}{{ messages | rejectattr('role', 'equalto', 'user') | list | length }}"
        "{{ [3, 1, 2] | sort | first }}",
        "1+1?|and\n 2+2?11",
    ),
    "dictionaries": (
        "{% for key, value in messages[0].items() %}{{ key }}={{ value }};{% endfor %}"
        "{% for key, value in {'b': 1, 'a': 2} | dictsort %}{{ key }}{{ value }}{% endfor %}"
        "{{ messages[0].get('name', 'nobody') }}{{ {'a': 1} | items | list }}",
        "role=user;content=1+1?;a2b1nobody[('a', 1)]",
    ),
    "tests": (
        "{{ messages[0].content is string }}{{ messages is mapping }}{{ tools is none }}"
        "{{ absent is defined }}{{ messages is iterable and messages is sequence }}"
        "{{ 'user' in messages[0].values() }}",
        "TrueFalseTrueFalseTrueTrue",
    ),
    "JSON as it was trained on": (
        "{{ {'b': '<ü> & \\'', 'a': [1, none, true]} | tojson }}{{ {'a': {'c': 1}} | tojson(indent=2) }}",
        '{"b": "<ü> & \'", "a": [1, null, true]}{\n  "a": {\n    "c": 1\n  }\n}',
    ),
    "what is absent is empty": (
        "{{ absent }}[{{ messages[0].absent or 'x' }}]{{ absent | default('d') }}",
        "[x]d",
    ),
    "marks of training": ("{% generation %}{{ messages[1].content }}{% endgeneration %}", "2"),
    "expressions": (
        "{{ 1 ~ 'a' ~ none }}{{ 7 // 2 }}{{ 'x' if not tools else 'y' }}{{ (1, 2)[1] }}",
        "1aNone3x2",
    ),
}


def confined(source: str, variables: dict[str, Any], chats: Sequence[dict[str, Any]]) -> list[str | None]:
    renderer = Renderer(source, variables, Limits(), "template")
    try:
        return [answer if isinstance(answer, str) else None for answer in renderer.render_all(chats)]
    finally:
        renderer.close()


@pytest.mark.parametrize("name", FEATURES)
def test_what_templates_use_of_jinja(name: str) -> None:
    source, expected = FEATURES[name]
    variables, chats = {"tools": None}, [{"messages": CHATS[2]}]
    assert plainly(source, variables, chats) == [expected]
    assert confined(source, variables, chats) == [expected]


@pytest.mark.parametrize("name", thinned(TEMPLATES or ["none"], 4, 3))
def test_real_templates_are_rendered_as_plain_jinja_does(name: str) -> None:
    if name not in TEMPLATES:
        missing(Need.VOCABULARIES)
    source = (DOWNLOADED / "templates" / name).read_text(encoding="utf-8")
    common = {"bos_token": "<s>", "eos_token": "</s>", "documents": None}
    with_tools = {"tools": [WEATHER], "functions": json.dumps([WEATHER]), "datetime": "today"}
    chats = [
        {"messages": chat, "add_generation_prompt": more, **tools}
        for tools in ({"tools": None}, with_tools)
        for chat in CHATS
        for more in (True, False)
    ]
    expected = plainly(source, common, chats)
    assert confined(source, common, chats) == expected
    assert (
        sum(text is not None for text in expected) >= 8
    )  # Gemma 2's refuses most: it has no system messages, and its turns alternate
