"""A plan in words, for a terminal."""

from collections.abc import Iterator
from datetime import timedelta

from nightmill.jobs.base.printable import printable
from nightmill.jobs.base.times import describe_moment
from nightmill.jobs.commands.printing import counted, describe_cost
from nightmill.worker.commands.planning.plan import Estimate, Plan
from nightmill.worker.commands.planning.rows import describe_rows

_MOST_MARKS = 5  # that are named
_LOSS = "on a GPU that costs a model of 7B no speed, and one of 0.5B up to a third if all rows ask for it"
"""Measured: benchmarks/RESULTS.md, "Structured output" and "Log-probabilities"."""


def describe_plan(plan: Plan, price_per_kwh: float | None = None) -> Iterator[str]:
    """Lines: the rows, what they ask for, when it will be done, and what it costs."""
    found = plan.survey
    yield from describe_rows(plan.file, found.rows, found.good, found.bad)
    for name, count in plan.other_models.items():
        yield (
            f"note: {count:,} rows ask for model {name!r}: nightmill run answers them with {plan.model!r} "
            f"all the same, nightmill batch submit with --model {plan.model}; without, they wait for {name!r}"
        )
    if found.cut:
        yield (
            f"note: {found.cut:,} rows have max_tokens beyond what the context of {plan.limits.context:,} "
            "tokens leaves them; an answer that long is cut there (stop reason context_full)"
        )
    if found.tools:
        yield (
            f"note: {found.tools:,} rows name tools; the calls that they are answered with are for you to "
            "make"
        )
    if found.constrained.total():
        kinds = ", ".join(f"{count:,} by {kind}" for kind, count in found.constrained.most_common() if count)
        yield (
            f"note: {found.constrained.total():,} rows say what their answer must be ({kinds}); "
            f"where that ends their answers is not foreseen; {_LOSS}"
        )
    if found.told:
        yield (
            f"note: {found.told:,} rows ask for log-probabilities, or for scores of texts, whose own tokens "
            "are not counted; on a GPU a night loses some 5% of its speed if all rows do"
        )
    if found.marked:
        shown = ", ".join(printable(mark) for mark, _ in found.marks.most_common(_MOST_MARKS))
        yield (
            f"note: {counted(found.marked, 'plain prompt')} with special tokens of the model spelt out "
            f"({shown}): they are read as characters, never as control tokens; give messages for the model's "
            "own template to write them, or token ids"
        )
    if plan.template_fault is not None:
        yield f"note: {printable(plan.template_fault)}"
    if not found.good:
        return
    mean = sum(found.prompt_tokens) / found.good
    longest = max(found.prompt_tokens)
    yield f"prompt tokens  {sum(found.prompt_tokens):,} (mean {mean:,.0f}, longest {longest:,})"
    if (answers := sum(found.answers)) > found.good:
        yield f"answers        {answers:,}"
    most = f"at most {found.tokens_at_most:,}"
    yield "output tokens  " + (
        most if plan.output_tokens is None else f"about {plan.output_tokens:,} ({most})"
    )
    yield f"KV pages       {_describe_pages(plan)}"
    if plan.memory is not None:
        yield f"memory         of {plan.card}: {plan.memory}"
    if plan.estimate is None:
        yield "time           no estimate: too few rows to measure a speed with, or --no-measure"
    else:
        yield from _describe_estimate(plan.estimate)
        cost = describe_cost(plan.estimate.gpu_seconds, plan.estimate.energy_kwh, price_per_kwh)
        yield f"cost           about {cost}"


def _describe_pages(plan: Plan) -> str:
    pages = plan.pages
    have = "" if plan.limits.pages is None else f"; this worker has {plan.limits.pages:,}"
    return (
        f"{pages.running:,} for the rows that run at once (at most {pages.running_at_most:,}), "
        f"{pages.whole:,} for all; {plan.limits.page_size} tokens each{have}"
    )


def _describe_estimate(estimate: Estimate) -> Iterator[str]:
    played = estimate.played
    workers = "1 worker" if estimate.workers == 1 else f"{estimate.workers} workers"
    yield (
        f"speed          {played.tokens_per_second:,.0f} output tokens/s on {workers} with {played.slots:,} "
        f"rows at once (measured on {estimate.measured_rows:,} rows in {estimate.measured_seconds:.1f} s)"
    )
    yield (
        f"time           {_span(played.seconds)}, of which {_span(played.tail_seconds)} for the last rows; "
        f"from {describe_moment(estimate.starts_at)} to {describe_moment(estimate.done_at)}"
        + ("" if estimate.hours is None else f", in the hours {estimate.hours}")
    )
    if estimate.deadline_at is not None:
        spare = (estimate.deadline_at - estimate.done_at).total_seconds()
        verdict = f"fits, with {_span(spare)} to spare" if spare >= 0 else f"DOES NOT FIT, by {_span(-spare)}"
        yield f"deadline       {describe_moment(estimate.deadline_at)}: {verdict}"


def _span(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    return str(timedelta(seconds=round(seconds)))
