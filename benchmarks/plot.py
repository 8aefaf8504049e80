"""Draw what `benchmarks.scaling` measured, against the hardware's limit and other engines.

    python -m benchmarks.plot scaling.jsonl -o docs/throughput.svg [--peers 7b]

Prints the same figures as Markdown tables. The same lines give the same file, to the byte, with the same
release of matplotlib.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator, StrMethodFormatter
from pydantic import ValidationError

from benchmarks.scaling import ANSWER, PROMPT, Point

# Sequences and output tokens/s, each with the best of its settings on an H200 (RESULTS.md). One sequence is
# of 128 -> 256 tokens, the 4,096 are of 64..512 -> 64..256 (hollow markers), the others of PROMPT -> ANSWER.
PEERS = {
    "0.5b": {
        "vLLM 0.24, output": [(1, 667), (256, 40_300), (1024, 34_500), (4096, 24_400)],
        "llama.cpp, output": [(1, 746), (256, 19_500)],
    },
    "7b": {
        "vLLM 0.24 in FP8, output": [(1, 293), (64, 10_170), (256, 15_700)],
        "llama.cpp in Q4_K, output": [(1, 311), (256, 2_120)],
    },
}
Peers = Mapping[str, list[tuple[int, int]]]
OTHER_LENGTHS = (1, 4096)
DECODE, OUTPUT, LIMIT = "Nightmill, decoding", "Nightmill, output", "limit of the GPU, decoding"
COLOURS = {DECODE: "#0072b2", OUTPUT: "#56b4e9", LIMIT: "#555555"}  # Okabe and Ito's, told apart by all
PEER_COLOURS = ("#d55e00", "#cc79a7")
STYLE = {
    "svg.hashsalt": "nightmill", "svg.fonttype": "none", "text.parse_math": False, "font.size": 9,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": "#e5e5e5",
    "axes.titlesize": 9, "lines.markersize": 4, "lines.linewidth": 1.5, "legend.frameon": False,
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Read, draw, print."""
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("results", type=Path, help="the lines that benchmarks.scaling printed")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE.svg")
    parser.add_argument("--peers", choices=PEERS, default="0.5b", help="the size that others are drawn of")
    options = parser.parse_args(arguments)
    points = read(options.results)
    draw(points, options.output, PEERS[options.peers])
    print("\n".join(tables(points)))


def read(path: Path) -> list[Point]:
    """The points of a file; raises SystemExit that names the line at fault."""
    points = []
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SystemExit(f"{path} cannot be read: {error}") from error
    for number, line in enumerate(lines, start=1):
        try:
            points.append(Point.model_validate_json(line))
        except ValidationError as error:
            fault = error.errors()[0]
            where = "".join(f"{part}: " for part in fault["loc"])
            raise SystemExit(
                f"{path}, line {number} is not a point of benchmarks.scaling: {where}{fault['msg']}"
            ) from error
    if missing := {"sequences", "contexts"} - {point.series for point in points}:
        raise SystemExit(f"{path} holds no points of the series {' and '.join(sorted(missing))}")
    if len(measured := {f"{point.model} on {point.gpu}" for point in points}) > 1:
        raise SystemExit(f"{path} mixes measurements: {', '.join(sorted(measured))}")
    return sorted(points, key=lambda point: (point.sequences, point.context))


def of(series: str, points: list[Point]) -> list[Point]:
    """The points of one series."""
    return [point for point in points if point.series == series]


def draw(points: list[Point], path: Path, peers: Peers) -> None:
    """Write an SVG, 900 pixels wide."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(900 / 96, 400 / 96), layout="constrained", facecolor="white")
        wide, narrow = figure.subplots(1, 2, width_ratios=(5, 3))
        figure.suptitle(f"{points[0].model} on {points[0].gpu}", fontsize=10)
        counts = of("sequences", points)
        sequences = [point.sequences for point in counts]
        decoding(wide, sequences, counts)
        wide.plot(
            sequences, [point.output_tokens_per_s for point in counts],
            "o-", color=COLOURS[OUTPUT], label=OUTPUT,
        )  # fmt: skip
        for (name, rates), colour in zip(peers.items(), PEER_COLOURS, strict=True):
            wide.plot(
                *zip(*rates, strict=True), "s:", color=colour, label=name
            )  # between them nothing is known
            other = [rate for rate in rates if rate[0] in OTHER_LENGTHS]
            wide.plot(*zip(*other, strict=True), "s", color=colour, markerfacecolor="white")
        axes(wide, f"{PROMPT} → {ANSWER} tokens", "sequences at once", [1, 4, 16, 64, 256, 1024, 4096])
        wide.legend(loc="lower right")
        contexts = of("contexts", points)
        decoding(narrow, [point.context for point in contexts], contexts)
        title = f"{contexts[0].sequences} sequences"
        axes(narrow, title, "context, tokens", [point.context for point in contexts])
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})


def decoding(panel: Axes, x: list[int], points: list[Point]) -> None:
    """The rate of decoding and its limit."""
    limits = [point.limit_tokens_per_s for point in points]
    rates = [point.decode_tokens_per_s for point in points]
    panel.plot(x, limits, "--", color=COLOURS[LIMIT], label=LIMIT)
    panel.plot(x, rates, "o-", color=COLOURS[DECODE], label=DECODE)


def axes(panel: Axes, title: str, xlabel: str, ticks: list[int]) -> None:
    """Both logarithmic, with plain numbers."""
    panel.set(title=title, xlabel=xlabel, ylabel="tokens/s", xscale="log", yscale="log", xticks=ticks)
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        axis.set_minor_locator(NullLocator())


def tables(points: list[Point]) -> list[str]:
    """Lines of Markdown, a table for each series."""
    lines = ["| sequences | decode tokens/s | limit | share | output tokens/s |", "| --- " * 5 + "|"]
    lines += [
        f"| {point.sequences:,} {rates(point)}| {point.output_tokens_per_s:,.0f} |"
        for point in of("sequences", points)
    ]
    lines += ["", "| context | decode tokens/s | limit | share |", "| --- " * 4 + "|"]
    return lines + [f"| {point.context:,} {rates(point)}|" for point in of("contexts", points)]


def rates(point: Point) -> str:
    """The columns that both tables have."""
    decode, limit = point.decode_tokens_per_s, point.limit_tokens_per_s
    return f"| {decode:,.0f} | {limit:,.0f} | {decode / limit:.0%} "


if __name__ == "__main__":
    main()
