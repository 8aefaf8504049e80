"""Statistics of an engine."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters of an engine's work since it was made, and how full it is."""

    steps: int  # launches
    step_sequences: int  # computed, summed over launches
    prompt_tokens: int  # computed; those computed again after preemption count again
    shared_tokens: int  # of prompts, found computed at admission; counted again after preemption
    generated_tokens: int  # drawn and kept
    resumed_tokens: int  # drawn by earlier attempts and gone on from
    preemptions: int
    guessed_tokens: int  # computed as drafts of what would be drawn
    guessed_right: int  # of those, the ones that were drawn
    running: int
    waiting: int
    free_pages: int
    pages: int
    cache_tokens: int  # that the pages hold, of sequences of usual length
    context: int  # tokens that a sequence may have
    sequences: int  # that may run at once
    gpu_seconds: float = 0.0  # of steps, charged to the sequences that they computed
    energy_joules: float | None = None  # of these; None if the device does not tell
