"""benchmarks.scaling, plot and rows: what is timed, what it is held against, and how that is shown."""

import json
from pathlib import Path

import pytest

from benchmarks import plot, rows, scaling
from benchmarks.engine import in_ranges
from benchmarks.limits import Limit
from benchmarks.scaling import Load, Point
from nightmill.worker.runners.base import Drawn
from tests.specs import dense_spec
from tests.unit.engine.scripted import Clock, ScriptedRunner

QWEN = dense_spec(name="Qwen2.5-0.5B", layers=24, vocab=151_936)


class TimedRunner(ScriptedRunner):
    """A step takes a second, with a piece of a prompt a hundred; a token is there when it is collected."""

    def __init__(self, clock: Clock, *, slots: int, depth: int) -> None:
        super().__init__(kv_blocks=64 * slots, slots=slots, depth=depth)
        self._clock = clock
        self._collected = 0

    def collect(self) -> Drawn | None:
        batch = self.batches[self._collected]
        self._collected += 1
        self._clock.now += 1 if len(batch.tokens) == len(batch.slots) else 100
        return super().collect()


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("count", [1, 7, 16])
def test_decode_rate_is_of_the_steps_in_which_all_decode(
    count: int, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scaling, "TOKEN_BUDGET", 32)
    clock = Clock()
    run = scaling.measure(TimedRunner(clock, slots=16, depth=depth), Load(count, 20, 40), 0, clock)
    assert run.decode == count
    assert run.output == count * 40 / (clock.now - 1000)
    assert 20 < run.context < 60


def test_no_rate_where_the_first_answer_ends_before_the_last_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "TOKEN_BUDGET", 32)
    clock = Clock()
    with pytest.raises(AssertionError, match="no step in which all"):
        scaling.measure(TimedRunner(clock, slots=16, depth=3), Load(16, 20, 5), 0, clock)


@pytest.mark.parametrize("context", scaling.CONTEXTS)
def test_long_prompts_leave_steps_in_which_all_decode_around_their_context(context: int) -> None:
    count, prompt, answer = scaling.long_load(context)
    steps_of_prompts = count * prompt / (scaling.TOKEN_BUDGET - count)
    assert answer - steps_of_prompts >= scaling.LONG_STEPS
    assert prompt + answer / 2 == pytest.approx(context, abs=1)
    assert prompt + answer < QWEN.context_length


# By hand: 494 million weights, so 988 MB a step and 0.988 GFLOP a token; 12,288 bytes of keys and values a
# token. At 512 tokens attention takes 1.473 us a sequence; products take 231 us, or 1.3 us each of over 178.
@pytest.mark.parametrize(
    ("sequences", "context", "expected"),
    [(1, 512, 4_300), (32, 512, 115_000), (256, 512, 360_000), (1024, 512, 360_000), (256, 640, 318_000)],
)
def test_limit_is_what_bytes_and_flops_allow(sequences: int, context: int, expected: int) -> None:
    assert Limit(QWEN).decoding(sequences, context) == pytest.approx(expected, rel=0.01)


# By hand: 358 million weights in layers and 136 million in the head.
def test_limit_of_a_workload_is_that_of_its_prompts_and_of_its_steps() -> None:
    limit = Limit(QWEN)
    steps = sum(256 / limit.decoding(256, 512 + step) for step in range(1, 256))
    prompts = (256 * 512 * 2 * 358e6 + 256 * 2 * 136e6 + 24 * 4 * 896 * 256 * 512 * 513 / 2) / 760e12
    assert limit.workload([512] * 256, [256] * 256, slots=256) == pytest.approx(prompts + steps, rel=0.002)
    alone = limit.workload([512] * 256, [256] * 256, slots=1)
    assert alone == pytest.approx(prompts + 256 * 255 / limit.decoding(1, 640), rel=0.002)
    assert limit.workload([1024] * 8, [1] * 8, slots=8) < limit.workload([1024] * 8, [2] * 8, slots=8)


def made_up() -> list[Point]:
    counts = [("sequences", count, 640) for count in scaling.SEQUENCES]
    contexts = [("contexts", 32, context) for context in scaling.CONTEXTS]
    return [
        Point(
            series=series, sequences=count, prompt=512, answer=256, context=context, model="Qwen2.5-0.5B",
            formats="", gpu="NVIDIA H200",
            limit_tokens_per_s=(limit := Limit(QWEN).decoding(count, context)),
            decode_tokens_per_s=limit / 2, output_tokens_per_s=limit / 4,
        )
        for series, count, context in counts + contexts
    ]  # fmt: skip


def write(path: Path, points: list[Point]) -> Path:
    path.write_text("".join(point.model_dump_json() + "\n" for point in points))
    return path


def test_plot_names_its_series_and_is_the_same_every_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = write(tmp_path / "scaling.jsonl", made_up())
    first, second = tmp_path / "a.svg", tmp_path / "b.svg"
    plot.main([str(results), "-o", str(first)])
    printed = capsys.readouterr().out
    plot.main([str(results), "-o", str(second)])
    dark = tmp_path / "a-dark.svg"
    assert first.read_bytes() == second.read_bytes() != dark.read_bytes()
    drawn = first.read_text()
    for words in (plot.DECODE, plot.OUTPUT, plot.LIMIT, *plot.PEERS["0.5b"], "tokens/s", "sequences at once"):
        assert f">{words}<" in drawn
        assert f">{words}<" in dark.read_text()
    assert plot.LIGHT.page not in dark.read_text()
    limit = Limit(QWEN).decoding(256, 640)
    assert f"| 256 | {limit / 2:,.0f} | {limit:,.0f} | 50% | {limit / 4:,.0f} |" in printed.splitlines()
    assert len(printed.splitlines()) == len(scaling.SEQUENCES) + len(scaling.CONTEXTS) + 7


def test_a_row_of_panels_for_each_file_beside_peers_of_its_size(tmp_path: Path) -> None:
    small = write(tmp_path / "small.jsonl", made_up())
    as_large = {"model": "Qwen2.5-7B", "formats": "weights in FP8"}
    counts = [point.model_copy(update=as_large) for point in made_up() if point.series == "sequences"]
    large = write(tmp_path / "large.jsonl", counts)  # of which no contexts were measured
    both = [str(small), str(large), "-o", str(tmp_path / "both.svg")]
    plot.main([*both, "--peers", "0.5b", "7b"])
    drawn = (tmp_path / "both.svg").read_text()
    titles = ("Qwen2.5-0.5B, in 16 bits, on NVIDIA H200", "Qwen2.5-7B, weights in FP8, on NVIDIA H200")
    assert all(f">{words}<" in drawn for words in (*titles, *plot.PEERS["0.5b"], *plot.PEERS["7b"]))
    assert drawn.count(">sequences at once<") == 2 and drawn.count(">context, tokens<") == 1
    with pytest.raises(SystemExit):
        plot.main(both)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("loading weights\n", "line 1 is not a point of benchmarks.scaling: .*JSON"),
        ('{"series": "sequences"}\n', "line 1 is not a point .*: sequences: Field required"),
        ("", "no points of the series sequences"),
    ],
)
def test_other_file_is_refused_with_the_reason(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text(text)
    with pytest.raises(SystemExit, match=rf"bad\.jsonl.*{message}"):
        plot.read(tmp_path / "bad.jsonl")


def test_missing_file_and_mixed_machines_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="cannot be read"):
        plot.read(tmp_path / "none.jsonl")
    points = made_up()
    other = points[0].model_copy(update={"gpu": "NVIDIA H100"})
    with pytest.raises(
        SystemExit, match=r"mixes measurements: Qwen2\.5-0\.5B, in 16 bits, on NVIDIA H100; Qwen"
    ):
        plot.read(write(tmp_path / "mixed.jsonl", [*points, other]))


def test_a_rate_of_nothing_is_refused(tmp_path: Path) -> None:
    row = json.loads(made_up()[0].model_dump_json()) | {"decode_tokens_per_s": 0}
    (tmp_path / "zero.jsonl").write_text(json.dumps(row))
    with pytest.raises(SystemExit, match=r"line 1 .*decode_tokens_per_s: Input should be greater than 0"):
        plot.read(tmp_path / "zero.jsonl")


def test_neighbouring_sizes_whose_products_take_one_way_are_told_once() -> None:
    assert in_ranges({1: "a", 8: "a", 1024: "b", 2048: "a"}) == "1 to 8 a, 1,024 b, 2,048 a"


def test_packed_weights_are_shown_as_shares_of_sixteen_bits() -> None:
    def timing(weights: str, count: int, products: float, step: float) -> rows.Timing:
        return rows.Timing(weights, count, products, step, ways={})

    found = [timing("16 bits", 1, 3e-3, 4e-3), timing("16 bits", 4096, 0.06, 0.08)]
    found += [timing("Q4_K", 1, 1.5e-3, 2.4e-3), timing("Q4_K", 4096, 0.0618, 0.08)]
    assert rows.table(found) == [
        "| rows | 16 bits: products, us | step, us | Q4_K: products | step |",
        "| --- | --- | --- | --- | --- |",
        "| 1 | 3,000 | 4,000 | 0.50 | 0.60 |",
        "| 4,096 | 60,000 | 80,000 | 1.03 | 1.00 |",
    ]
