"""benchmarks.real_night: which rows there are, and which of them are shown."""

from collections import Counter

from benchmarks.real_night import of_all_kinds, rows, summary


def kind(row: dict[str, object]) -> str:
    return str(row["custom_id"]).partition("-")[0]


def test_there_are_500_different_rows_of_eight_kinds() -> None:
    found = rows()
    assert len({row["custom_id"] for row in found}) == 500
    prompts = {row["messages"][0]["content"] for row in found}
    assert len(prompts) == 500
    assert not any("{" in prompt for prompt in prompts)  # no place that was left open
    assert Counter(map(kind, found)) == {
        "question": 130, "translation": 60, "review": 50, "json": 60, "program": 50, "poem": 40, "text": 90,
        "texts": 20,
    }  # fmt: skip
    assert rows() == found


def test_answers_that_are_shown_are_of_all_kinds() -> None:
    shown = of_all_kinds(rows())
    assert len(shown) == 500
    assert len({kind(row) for row in shown[:8]}) == 8
    assert shown[0] == rows()[0]


def test_rates_are_of_the_time_in_which_rows_were_worked_on() -> None:
    result = {"stop_reason": "eos", "prompt_tokens": 30, "completion_tokens": 20}
    told = summary([result, result | {"stop_reason": "length"}], 3, 12.0, 4.0)
    assert (told["rows"], told["succeeded"], told["rows_per_s"], told["output_tokens_per_s"]) == (
        3,
        2,
        0.5,
        10,
    )
    assert told["stop_reasons"] == {"eos": 1, "length": 1}
