"""GBNF means what it means to llama.cpp: a search for a text that one takes and the other does not."""

import os
import random

import numpy as np
import pytest
from llguidance import LLMatcher

from nightmill.jobs.base.contract import Constrained, ConstraintKind
from nightmill.jobs.errors import ConstraintError
from nightmill.worker.grammar.checker import Checker, CheckerLimits, ParserLimits
from nightmill.worker.grammar.gbnf import GbnfError, is_gbnf, to_lark
from nightmill.worker.grammar.source import complete
from tests.support.llama_grammar import follower
from tests.support.walking import BYTES, accepts

GRAMMARS = int(os.environ.get("NIGHTMILL_TEST_GBNF", "800"))
"""That are tried; a search of its own takes 20,000."""
_ALPHABET = ["a", "b", "c", "-", "]", "&", "\n", " ", "/", "é", "ü", "\U0001f600"]


def item(draw: random.Random, names: list[str], depth: int) -> str:
    match draw.randrange(11):
        case 0 | 1 | 2:
            text = "".join(draw.choice(_ALPHABET) for _ in range(draw.choice([0, 1, 1, 1, 2, 3])))
            return '"' + "".join(written(draw, one) for one in text) + '"'
        case 3 | 4:
            return characters(draw)
        case 5 | 6 | 7:
            return draw.choice(names)
        case 8:
            return "."
        case _ if depth:
            return f"({draw.choice([' ', chr(10)])}{alternatives(draw, names, depth - 1)})"
        case _:
            return '"a"'


def written(draw: random.Random, character: str) -> str:
    code = ord(character)
    escapes = [f"\\U{code:08x}"]
    if code < 0x10000:
        escapes.append(f"\\u{code:04X}")
    if code < 0x100:
        escapes.append(f"\\x{code:02x}")
    plain = {"\n": "\\n", "]": draw.choice(["]", "\\]"])}.get(character, character)
    return draw.choice(escapes) if draw.random() < 0.2 else plain


def characters(draw: random.Random) -> str:
    made = ""
    for _ in range(draw.randrange(1, 4)):
        low, high = sorted(draw.sample([one for one in _ALPHABET if one != "-"], 2))
        ends = ["\\]" if one == "]" else written(draw, one) for one in (low, high)]
        made += draw.choice([ends[0], "-".join(ends), "\\x2d"])
    return "[" + draw.choice(["", "", "^"]) + made + draw.choice(["", "", "-"]) + "]"


def alternatives(draw: random.Random, names: list[str], depth: int) -> str:
    parts = []
    for _ in range(draw.choice([1, 1, 2, 3])):
        items = []
        for _ in range(draw.choice([0, 1, 1, 2, 2, 3])):
            sign = draw.choice(["", "", "", "", "*", "+", "?", "{2}", "{1,3}", "{0,2}", "{ 2 , }"])
            made = item(draw, names, depth)
            items.append(made + ("" if made == '""' else sign))
        parts.append(" ".join(items))
    parts[-1] = parts[-1] or '""'  # a rule that ended here would go on in the next line
    return " | ".join(parts)


def grammar(draw: random.Random) -> str:
    names = ["root", *(f"r{number}-{draw.choice('aB')}" for number in range(draw.randrange(5)))]
    lines = [f"{name} ::= {alternatives(draw, names, 2)}" for name in names]
    return "\n# a comment: \"'\n".join(lines)


def next_characters(matcher: LLMatcher) -> set[str]:
    mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
    found = set()
    for one in _ALPHABET:
        data = list(one.encode())
        if mask[data[0]] and (len(data) == 1 or matcher.deep_copy().try_consume_tokens(data) == len(data)):
            found.add(one)
    return found


def agree(text: str, draw: random.Random, walks: int, most: int) -> int:
    """Walk through both together; returns how many characters they agreed on."""
    lark = to_lark(text)
    matcher = LLMatcher(BYTES, complete(lark), log_level=0, limits=ParserLimits().build())
    assert not matcher.is_error(), f"{text}\n{lark}\n{matcher.get_error()}"
    steps = 0
    for _ in range(walks):
        ours, theirs = matcher.deep_copy(), follower(text)
        written = ""
        for _ in range(most):
            assert ours.is_accepting() == theirs.may_end, f"{text}\n{lark}\n{written!r}: {theirs.may_end}"
            allowed = {one for one in _ALPHABET if theirs.allows(one)}
            assert next_characters(ours) == allowed, f"{text}\n{lark}\n{written!r}: {allowed}"
            assert not ours.is_error() or not allowed, f"{text}\n{written!r}: {ours.get_error()[:300]}"
            if not allowed or len(theirs.stacks) > 40:
                break
            chosen = draw.choice(sorted(allowed))
            assert ours.try_consume_tokens(list(chosen.encode())) == len(chosen.encode())
            theirs = theirs.accept(chosen)
            written += chosen
            steps += 1
    return steps


@pytest.mark.heavy
def test_random_grammars_take_what_llama_cpp_takes_step_by_step() -> None:
    draw = random.Random(7)
    tried = refused = steps = 0
    while tried < GRAMMARS:
        text = grammar(draw)
        try:
            to_lark(text)
        except GbnfError as error:
            refused += 1
            assert_refused_for_a_reason(text, str(error))
            continue
        tried += 1
        steps += agree(text, draw, walks=3, most=12)
    assert refused < 3 * GRAMMARS and steps > 5 * GRAMMARS


def assert_refused_for_a_reason(text: str, said: str) -> None:
    """llama.cpp refuses it as well, never ends, or has no text to begin with."""
    assert is_gbnf(text)
    known = ("begins with itself", "never ends", "but the empty one")
    assert any(one in said for one in known), f"{text}\n{said}"


def matches(text: str, answer: str) -> bool:
    return accepts(LLMatcher(BYTES, complete(to_lark(text)), log_level=0), answer)


@pytest.mark.parametrize(
    ("text", "good", "bad"),
    [
        ('root ::= ("a"?)*', ["", "aaa"], ["b"]),
        ("root ::= ([0-9]{2})+", ["12", "1234"], ["123", ""]),
        ('root ::= "\\u0042"', ["B"], ["b"]),
        ("root ::= [\\u00e0-\\u00fc]+", ["àü"], ["a"]),
        ("root ::= . .", ["\n\n", "é\r"], ["a"]),
        ("root ::= [a&&b]", ["a", "&"], ["&&"]),
        ("root ::= [^[a~~]", ["]", "b"], ["[", "~", "a"]),
        ("root ::= [a-] [\\]x] [-a]", ["-]-"], ["b]-"]),
        ("start ::= root\nroot ::= start-1 \nstart-1 ::= [x]", ["x"], ["y"]),
        ('root ::= "a"+ "ab"', ["aab"], ["ab"]),
        ('root ::= "(" root ")" | word\nword ::= [a-z]+ ("." word)?', ["((a.bc))"], ["(a."]),
        ('root ::= tail | "x"\ntail ::= some root "."\nsome ::= "a"', ["aax.."], ["x."]),
        ('root ::= some root | "x"\nsome ::= other\nother ::= "a" | ""', ["x", "aax"], ["a"]),
        ('root ::= (\n  "a" # one\n  |\n  "b"\n) "c"\r\n', ["ac", "bc"], ["a"]),
        ('root ::= "a" |\n  "b"', ["a", "b"], []),
        ('root ::= "a"{ 2 , 3 } "b"{0} ""', ["aa", "aaa"], ["a", "aab"]),
        ('root ::= "a" * ?', ["", "aa"], []),
        ('# root : "a"\nroot ::= "start: x"', ["start: x"], []),
    ],
)  # fmt: skip
def test_grammars_mean_what_they_say(text: str, good: list[str], bad: list[str]) -> None:
    assert is_gbnf(text)
    assert [one for one in good if not matches(text, one)] == []
    assert [one for one in bad if matches(text, one)] == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('root ::= "a" item\nitem :: "b"', "line 2, column 6, in the rule 'item': '::=' is expected behind"),
        ('root ::= "a"\n  "b"', "line 2, column 3: a rule's name is expected, not '\"': a line's end ends"),
        ('root ::= é ', "line 1, column 10, in the rule 'root': 'é' is not part of GBNF; quote"),
        ('root ::= "a" |\nitem ::= "b"', "line 2, column 6, in the rule 'root': '::=' stands within a rule"),
        ('root ::= (("a")', "line 1, column 10, in the rule 'root': '(' is not closed: add ')'"),
        ('root ::= "a")', "line 1, column 13, in the rule 'root': ')' closes nothing"),
        ('root ::= "a\n', "line 1, column 10, in the rule 'root': the text is not closed"),
        ("root ::= [a\n", "line 1, column 10, in the rule 'root': the class is not closed"),
        ("root ::= []", "the class is empty"),
        ("root ::= [z-a]", "line 1, column 11, in the rule 'root': the range runs backwards"),
        ('root ::= "\\d"', "line 1, column 11, in the rule 'root': the escape \\d is unknown"),
        ('root ::= "\\u00"', "\\u needs 4 hexadecimal digits"),
        ('root ::= "\\U00110000"', "past U+10FFFF"),
        ('root ::= "\\ud800"', "U+D800 is not a character of texts"),
        ('root ::= "\\x00"', "U+0000 is not a character of texts"),
        ("root ::= * ", "'*' has nothing before it to repeat"),
        ('root ::= "a"{3,2}', "column 13, in the rule 'root': {3,2} ends below its beginning; write {2,3}"),
        ('root ::= "a"{,2}', "a number is expected in a repetition, as in {0,5}, not ','"),
        ('root ::= "a"{2', "'}' or a number is expected in a repetition, not the end"),
        ('root ::= "a"{1,2001}', "repeats more than 2,000 times; leave the upper number out"),
        ("root ::= <think>", "names tokens of the model, with which no answer is spelt; write the text"),
        ('root ::= "a"\nroot ::= "b"', "line 2, column 1, in the rule 'root': the rule is defined twice,"),
        ('item ::= "a"', "has no rule named root"),
        ('root ::= "a" item', "line 1, column 14, in the rule 'root': the rule 'item' is not defined"),
        ('root ::= "a" root', "line 1, column 1: the rule 'root' never ends"),
        ('root ::= root "a" | "b"', "line 1, column 1: the rule 'root' begins with itself (left recursion)"),
        ('root ::= "a"? root "a" | "b"', "begins with itself (left recursion)"),
        ('root ::= root | "b"', "begins with itself (left recursion)"),
        ('root ::= a\na ::= b "x"\nb ::= a | "y"', "the rule 'a' begins with itself, by way of 'b'"),
        ('root ::= ""', "allows no answer but the empty one"),
        ("root ::= " + "(" * 200, "parentheses are nested more than 128 deep"),
        ("\n".join(f"r{n} ::= [a]" for n in range(4001)), "more than 4,000 rules"),
        ('root ::= "' + "a" * (256 << 10) + '"', "more than 262,144; simplify it"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_its_place_and_a_remedy(text: str, said: str) -> None:
    with pytest.raises(GbnfError) as refused:
        to_lark(text)
    assert said in str(refused.value) and len(str(refused.value)) < 400


def test_grammars_are_told_apart() -> None:
    assert is_gbnf('start ::= "a"') and is_gbnf('# a\n\nroot-2 ::= "start: x"') and is_gbnf("<a>\nroot ::= b")
    assert is_gbnf('start: "a ::= b"') is False and is_gbnf('%llguidance {}\nstart : "a"') is False
    assert is_gbnf("nonsense =") is None


JSON = r"""root ::= object
value ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""


def test_large_parts_stay_lexemes_where_nothing_is_lost() -> None:
    """Followed character by character, a string of JSON would cost a step of the parser for each."""
    lark = to_lark(JSON)
    string = next(line for line in lark.splitlines() if "u{5c}-\\u{5c}" in line or "[0-9A-Fa-f]" in line)
    assert "\\u{22}/" in string and string.startswith(("L", "R"))
    for text in ('{"a": [1, -2.5e3, "x\\u00e9\\n", {}], "b":\n  null}', "{}"):
        assert matches(JSON, text)
    for text in ('{"a": 01}', '{"a": "\\x"}', '{"a" }', "[]"):
        assert not matches(JSON, text)


@pytest.mark.heavy
def test_the_largest_grammars_are_written_or_refused_by_the_process_that_checks() -> None:
    words = "root ::= " + " | ".join(f'"word{n}"' for n in range(16_000))
    chain = "\n".join(f"r{n} ::= r{n + 1}" for n in range(3_998)) + '\nr3998 ::= "x"\nroot ::= r0'
    nested = "root ::= " + "(" * 128 + '"a"' + ")*" * 128
    rules = "\n".join(f'r{n} ::= "(" r{(n * 7 + 3) % 3000} ")" | [a-z]+ "x"' for n in range(3_000))
    keywords = 'root ::= "(" root ")" | ' + " | ".join(f'"word{n}"' for n in range(9_000))
    checker = Checker(CheckerLimits(seconds=5.0))
    try:
        for text in (words, chain, nested, rules + "\nroot ::= r0", keywords):
            assert to_lark(text)
            try:
                assert checker.check(Constrained(ConstraintKind.GRAMMAR, text))
            except ConstraintError as error:
                assert len(str(error)) < 600 and "\n" not in str(error)
    finally:
        checker.close()
