"""Templates: what is parsed, what is refused and where, and that a row's text is data wherever it stands."""

import json
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from nightmill.jobs.errors import InvalidParameterError, InvalidRequestError
from nightmill.jobs.request.template import Empty, EmptyColumnError, Filter, Slot, Template

names = st.text(st.characters(codec="utf-8", exclude_characters="`\n\0"), min_size=1, max_size=12)
plain = st.text(st.characters(codec="utf-8", exclude_characters="{}\0"), max_size=20)
values = st.recursive(
    st.text(st.characters(codec="utf-8"), max_size=20)
    | st.integers()
    | st.booleans()
    | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=4,
)


def slots(template: Template) -> list[tuple[str, Filter]]:
    return [(slot.column, slot.filter) for slot in template.slots]


@given(st.lists(st.tuples(plain, names, st.booleans()), min_size=1, max_size=6), plain)
def test_what_is_written_between_braces_is_what_is_found(
    parts: list[tuple[str, str, bool]], end: str
) -> None:
    text = (
        "".join(f"{before}{{{{ `{name}`{' | json' * as_json} }}}}" for before, name, as_json in parts) + end
    )
    template = Template.parse(text)
    assert slots(template) == [(name, Filter.JSON if as_json else Filter.TEXT) for _, name, as_json in parts]
    literal = "".join(part for part in template.parts if isinstance(part, str))
    assert literal == "".join(before for before, _, _ in parts) + end


@given(values)
def test_a_value_is_written_once_and_never_read_as_a_template(value: Any) -> None:
    template = Template.parse("a {{ x | json }} b")
    assert template.fill({"x": value}) == f"a {json.dumps(value, ensure_ascii=False)} b"
    if isinstance(value, str):
        assert Template.parse("a {{ x }} b").fill({"x": value, "y": "no"}) == f"a {value} b"


@given(st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=40))
def test_any_text_is_a_template_or_refused_with_a_place(text: str) -> None:
    assume(text.strip())
    try:
        template = Template.parse(text)
    except InvalidParameterError as error:
        assert str(error).startswith("template: line ")
        return
    filled = template.fill({name: "v" for name, _ in slots(template)})
    if "{{" not in text:
        assert filled == text


@given(st.text("{}| `'\"jsonx%\n", max_size=16))
def test_braces_in_any_order_are_understood_or_refused(text: str) -> None:
    assume(text.strip())
    try:
        parts = Template.parse(text).parts
    except InvalidParameterError:
        return
    # What is left out of the text is what stands between `{{` and `}}`, as often as it opens.
    assert text.count("{{") >= sum(isinstance(part, Slot) for part in parts)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Hi {{ review", "line 1, column 4: '{{' is not closed"),
        ("a\nb {{ review }\n", "line 2, column 3: '{{' is not closed"),
        ("a }} b", "line 1, column 3: '}}' closes nothing"),
        ("{ review }}", "line 1, column 10: '}}' closes nothing"),
        ("{{}}", "line 1, column 1: '{{ }}' names no column"),
        ("{{ review | upper }}", "'upper' is not a filter; there are json and messages"),
        ("{% if review %}x{% endif %}", "line 1, column 1: '{% if': a template has no control flow"),
        ("x {{ chat | messages }}", "line 1, column 3: a chat stands alone"),
        ("{{ a }} {{ chat | messages }}", "a chat stands alone"),
        ("   ", "is empty"),
        ("a\0b", "NUL"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(text: str, said: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        Template.parse(text)
    assert said in str(caught.value)


@pytest.mark.parametrize("text", ["{{ a.b }}", "{{ a[0] }}", "{{ a() }}", "{{ a + b }}", "{{ __class__ }}"])
def test_what_is_no_column_is_refused_with_the_columns_there_are(text: str) -> None:
    with pytest.raises(InvalidParameterError, match=r"there is no column .*; there are 'a', 'b'"):
        Template.parse(text).check(["a", "b"])


def test_a_column_may_be_named_as_frames_name_nested_ones() -> None:
    Template.parse("{{ a.b }}").check(["a.b"])


@pytest.mark.parametrize(
    ("text", "filled"),
    [
        ('As {"a": {"b": {{ x }}}}', 'As {"a": {"b": 1}}'),
        ('{{ "{{" }} {{ x }} {{ "}}" }}', "{{ 1 }}"),
        ("{{x}}{{  x  }}", "11"),
        ("{{ `x` }}", "1"),
        ("{ {{ x }} }", "{ 1 }"),
    ],
)
def test_braces_of_the_texts_own_stay(text: str, filled: str) -> None:
    assert Template.parse(text).fill({"x": 1}) == filled


def test_values_become_text() -> None:
    template = Template.parse("{{ x }}")
    said = {True: "true", 2**63: "9223372036854775808", 0.1: "0.1", "": ""}
    for value, text in said.items():
        assert template.fill({"x": value}) == text
    for value in ([1], {"a": 1}):
        with pytest.raises(InvalidRequestError, match=r"write \{\{ x \| json \}\}"):
            template.fill({"x": value})


def test_no_value_is_an_error_or_nothing() -> None:
    template = Template.parse("a{{ x }}b{{ x | json }}")
    for empty in (Empty.ERROR, Empty.SKIP):
        with pytest.raises(EmptyColumnError, match="'x': has no value"):
            template.fill({}, empty)
    assert template.fill({}, Empty.KEEP) == "abnull"
