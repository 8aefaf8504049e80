"""The name of an arithmetic: one line that can be read again, and what differs between two."""

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nightmill.jobs.base.arithmetic import Arithmetic, difference, system_fingerprint

H200 = Arithmetic(
    runner="cuda",
    device="NVIDIA H200",
    weights="f16",
    kv="f16",
    kernels="0123456789abcdef",
    model="fedcba9876543210",
)
NAME = (
    "runner=cuda; device=NVIDIA H200; weights=f16; kv=f16; kernels=0123456789abcdef; model=fedcba9876543210"
)
PARTS = [part.name for part in fields(Arithmetic)]

values = st.text() | st.sampled_from(["", "a; model=b", "100%", "%3B", "a;b", "=", "x\ny", "; "])
arithmetics = st.builds(Arithmetic, **dict.fromkeys(PARTS, values))


def test_the_name_is_this_line() -> None:  # it is in people's databases
    assert str(H200) == NAME
    assert Arithmetic.parse(NAME) == H200


@given(arithmetics)
def test_a_name_is_one_line_and_says_all(one: Arithmetic) -> None:
    name = str(one)
    assert Arithmetic.parse(name) == one
    assert not any(character < " " or character == "\x7f" for character in name)


@given(arithmetics, arithmetics)
def test_two_arithmetics_have_one_name_only_if_they_are_one(one: Arithmetic, other: Arithmetic) -> None:
    assert (str(one) == str(other)) is (one == other) is (one.difference(other) == ())
    assert difference(str(one), str(other)) == one.difference(other)


@pytest.mark.parametrize("part", PARTS)
def test_the_part_that_differs_is_named_with_both_values(part: str) -> None:
    other = replace(H200, **{part: "another"})
    assert H200.difference(other) == (f"{part}: {getattr(H200, part)}, now another",)


def test_a_fingerprint_is_the_name_shortened() -> None:
    assert system_fingerprint(NAME) == "cuda-f16-k45f98d04-mfedcba98"
    assert (
        system_fingerprint(str(replace(H200, weights="fp8 in f16"))) == "cuda-fp8_in_f16-k45f98d04-mfedcba98"
    )
    assert system_fingerprint(None) is system_fingerprint("of a later version") is None


@pytest.mark.parametrize("part", PARTS)
def test_arithmetics_that_differ_have_other_fingerprints(part: str) -> None:
    assert system_fingerprint(str(replace(H200, **{part: "another"}))) != system_fingerprint(NAME)


def test_all_parts_that_differ_are_named() -> None:
    other = replace(H200, device="NVIDIA H100", model="0")
    assert H200.difference(other) == (
        "device: NVIDIA H200, now NVIDIA H100",
        "model: fedcba9876543210, now 0",
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "NVIDIA H200 in FP16",
        f"{NAME}; ",
        f"{NAME}; more=1",
        f"{NAME}; model=twice",
        NAME.partition("; model")[0],
    ],
)
def test_what_another_version_wrote_is_refused_and_quoted_whole(text: str) -> None:
    with pytest.raises(ValueError, match="not the name of an arithmetic"):
        Arithmetic.parse(text)
    assert difference(text, NAME) == (f"arithmetic: {text!r}, now {NAME!r}",)
    assert difference(text, text) == ()
