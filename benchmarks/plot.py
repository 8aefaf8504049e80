"""Draw what `benchmarks.scaling` measured, against the hardware's limit and other engines.

    python -m benchmarks.plot benchmarks/measured/*.jsonl -o docs/throughput.svg --peers 0.5b 7b

A row of panels for each file. Writes FILE.svg for light pages and FILE-dark.svg for dark ones, and prints the
same figures as Markdown tables. The same lines give the same files, to the byte, with the same release of
matplotlib.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter
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


@dataclass(frozen=True)
class Theme:
    """Colours; those of lines are Okabe and Ito's, or lighter ones, told apart by all."""

    page: str
    words: str
    grid: str
    decode: str
    output: str
    limit: str
    peers: tuple[str, str]


LIGHT = Theme("#ffffff", "#1f2328", "#e5e5e5", "#0072b2", "#56b4e9", "#555555", ("#d55e00", "#cc79a7"))
DARK = Theme("#0d1117", "#e6edf3", "#2b313a", "#56b4e9", "#b9e1f9", "#9aa4af", ("#ff8a3d", "#e6a3c8"))
STYLE = {
    "svg.hashsalt": "nightmill", "svg.fonttype": "none", "text.parse_math": False, "font.size": 9,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "axes.titlesize": 9,
    "lines.markersize": 4, "lines.linewidth": 1.5, "legend.frameon": False,
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Read, draw, print."""
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument(
        "results", type=Path, nargs="+", metavar="RESULTS.jsonl", help="lines that benchmarks.scaling printed"
    )
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE.svg")
    parser.add_argument(
        "--peers", choices=PEERS, nargs="+", default=["0.5b"], help="for each file: the size of the others"
    )
    options = parser.parse_args(arguments)
    if len(options.peers) != len(options.results):
        parser.error(f"{len(options.results)} files of results, but {len(options.peers)} of --peers")
    files = [read(path) for path in options.results]
    rows = [(points, PEERS[size]) for points, size in zip(files, options.peers, strict=True)]
    draw(rows, options.output, LIGHT)
    draw(rows, options.output.with_stem(f"{options.output.stem}-dark"), DARK)
    print("\n\n".join("\n".join([f"{title(points)}:", "", *tables(points)]) for points in files))


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
    if not of("sequences", points):
        raise SystemExit(f"{path} holds no points of the series sequences")
    if len(measured := {title([point]) for point in points}) > 1:
        raise SystemExit(f"{path} mixes measurements: {'; '.join(sorted(measured))}")
    return sorted(points, key=lambda point: (point.sequences, point.context))


def of(series: str, points: list[Point]) -> list[Point]:
    """The points of one series."""
    return [point for point in points if point.series == series]


def title(points: list[Point]) -> str:
    """What was measured."""
    first = points[0]
    return f"{first.model}, {first.formats or 'in 16 bits'}, on {first.gpu}"


def draw(rows: list[tuple[list[Point], Peers]], path: Path, theme: Theme) -> None:
    """Write an SVG, 900 pixels wide."""
    style = {
        "text.color": theme.words, "axes.labelcolor": theme.words, "axes.edgecolor": theme.words,
        "axes.titlecolor": theme.words, "axes.facecolor": theme.page, "xtick.color": theme.words,
        "ytick.color": theme.words, "grid.color": theme.grid,
    }  # fmt: skip
    with matplotlib.rc_context(STYLE | style):
        size = (900 / 96, 380 / 96 * len(rows))
        figure = Figure(figsize=size, layout="constrained", facecolor=theme.page)
        strips = figure.subfigures(len(rows), 1, squeeze=False, hspace=0.04)[:, 0]
        for strip, (points, peers) in zip(strips, rows, strict=True):
            strip.set_facecolor(theme.page)
            strip.suptitle(title(points), fontsize=10)
            contexts = of("contexts", points)
            panels = strip.subplots(
                1, 2 if contexts else 1, squeeze=False, width_ratios=(5, 3) if contexts else None
            )[0]
            draw_sequences(panels[0], of("sequences", points), peers, theme)
            if contexts:
                draw_contexts(panels[1], contexts, theme)
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})


def draw_sequences(panel: Axes, points: list[Point], peers: Peers, theme: Theme) -> None:
    """From one sequence to thousands."""
    sequences = [point.sequences for point in points]
    decoding(panel, sequences, points, theme)
    panel.plot(
        sequences, [point.output_tokens_per_s for point in points], "o-", color=theme.output, label=OUTPUT
    )  # fmt: skip
    for (name, rates), colour in zip(peers.items(), theme.peers, strict=True):
        panel.plot(*zip(*rates, strict=True), "s:", color=colour, label=name)  # nothing is known between them
        other = [rate for rate in rates if rate[0] in OTHER_LENGTHS]
        panel.plot(*zip(*other, strict=True), "s", color=colour, markerfacecolor=theme.page)
    ticks = [4**power for power in range(7) if 4**power <= sequences[-1]]
    axes(panel, f"{PROMPT} → {ANSWER} tokens", "sequences at once", ticks)
    panel.set_ylim(
        bottom=min(rate for rates in peers.values() for _, rate in rates) / 3
    )  # room for the words
    panel.legend(loc="lower right")


def draw_contexts(panel: Axes, points: list[Point], theme: Theme) -> None:
    """From short contexts to long ones."""
    decoding(panel, [point.context for point in points], points, theme)
    heading = f"{points[0].sequences} sequences"
    axes(panel, heading, "context, tokens", [point.context for point in points])
    panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))  # a decade or two


def decoding(panel: Axes, x: list[int], points: list[Point], theme: Theme) -> None:
    """The rate of decoding and its limit."""
    limits = [point.limit_tokens_per_s for point in points]
    rates = [point.decode_tokens_per_s for point in points]
    panel.plot(x, limits, "--", color=theme.limit, label=LIMIT)
    panel.plot(x, rates, "o-", color=theme.decode, label=DECODE)


def axes(panel: Axes, heading: str, xlabel: str, ticks: list[int]) -> None:
    """Both logarithmic, with plain numbers."""
    panel.set(title=heading, xlabel=xlabel, ylabel="tokens/s", xscale="log", yscale="log", xticks=ticks)
    panel.yaxis.set_major_locator(LogLocator(subs=(1, 3)))
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        axis.set_minor_locator(NullLocator())


def tables(points: list[Point]) -> list[str]:
    """Lines of Markdown, a table for each series."""
    lines = ["| sequences | decode tokens/s | limit | share | output tokens/s |", "| --- " * 5 + "|"]
    lines += [
        f"| {point.sequences:,} {rates(point)}| {point.output_tokens_per_s or 0:,.0f} |"
        for point in of("sequences", points)
    ]
    if contexts := of("contexts", points):
        lines += ["", "| context | decode tokens/s | limit | share |", "| --- " * 4 + "|"]
        lines += [f"| {point.context:,} {rates(point)}|" for point in contexts]
    return lines


def rates(point: Point) -> str:
    """The columns that both tables have."""
    decode, limit = point.decode_tokens_per_s, point.limit_tokens_per_s
    return f"| {decode:,.0f} | {limit:,.0f} | {decode / limit:.0%} "


if __name__ == "__main__":
    main()
