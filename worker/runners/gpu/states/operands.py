"""Operands of kernels of layers with states: pieces of sequences, states by slot, a layer's weights."""

from dataclasses import dataclass
from typing import Protocol

from nightmill.worker.runners.gpu.device.operands import ABSENT, INT, Buffer

__all__ = ["NO_PIECES", "LayerStates", "Mixer", "MixerWeights", "Pieces", "StepPieces"]


@dataclass(frozen=True, slots=True)
class Pieces:
    """Tokens of a step that go through states: for each piece, consecutive rows and their slot.

    The first four are addresses of int32 arrays (count,). A piece begins at a row of the step, has a length,
    a slot, and the position of its first token; where that is 0 the state counts as zeros, whatever the slot
    holds. A length of 0 is padding: nothing is read or written for it, and its other numbers may be anything.
    No two pieces of a launch have the same slot.

    count  pieces, those of padding included; with `rows` all that launch shapes hang on
    rows   of prompts, the rows of all pieces together: they follow each other, from the first piece's on, and
           no piece is padding. Drawn pieces may lie anywhere: not looked at
    """

    first_rows: int
    lengths: int
    slots: int
    starts: int
    count: int
    rows: int = 0

    @property
    def addresses(self) -> tuple[int, int, int, int]:
        """The arrays, in the order of the kernels' arguments."""
        return self.first_rows, self.lengths, self.slots, self.starts

    def part(self, first: int, count: int) -> "Pieces":
        """Some that follow each other; `rows` stays, which is then more than theirs."""
        rows, lengths, slots, starts = (address + first * INT.itemsize for address in self.addresses)
        return Pieces(rows, lengths, slots, starts, count, self.rows)


NO_PIECES = Pieces(0, 0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class StepPieces:
    """The pieces of a step.

    prompts  in the chunked form; a piece begins at a multiple of STATE_CHUNK, and any but a prompt's last
             ends at one
    drawn    in the recurrent form, token by token
    """

    prompts: Pieces = NO_PIECES
    drawn: Pieces = NO_PIECES


@dataclass(frozen=True, slots=True)
class LayerStates:
    """Addresses of a layer's state arrays, float32, by slot and contiguous: (slots, *StateArray.shape)."""

    inputs: int
    matrix: int = 0  # 0 where the mixer has none


@dataclass(frozen=True, slots=True)
class MixerWeights:
    """The small weights of a mixer, all float32; ABSENT those that it lacks."""

    convolution: Buffer  # (C, K)
    convolution_bias: Buffer = ABSENT  # (C,)
    time_step_bias: Buffer = ABSENT  # (H,)
    decay: Buffer = ABSENT  # (H,) or (H, 1): negative
    skip: Buffer = ABSENT  # (H,) or (H, 1)
    norm: Buffer = ABSENT  # (V,) of a delta net, (G, inner / G) of Mamba-2


class Mixer(Protocol):
    """A launcher of a mixer's kernels, between the product of its input and that of its output."""

    def __call__(
        self, x: Buffer, controls: Buffer, weights: MixerWeights, states: LayerStates, pieces: StepPieces,
        out: Buffer,
    ) -> None:  # fmt: skip
        """Queue it for the step's pieces: their rows of out are written and their slots updated, no others.

        Prompts go first: a slot may have a piece of its prompt, and one of drawn tokens behind that.

        x         elements (rows, stride): the product of MIXER_INPUT, each row's columns in the order of its
                  tensors, perhaps without the last, which are in `controls`, and with any number of columns
                  of padding behind; the stride is a multiple of 8
        controls  float (rows, stride): what MIXER_INPUT gives for beta and alpha of a delta net, (rows, 2 H),
                  and for the time step of Mamba-2, (rows, H); ABSENT: they are columns of x, as elements
        out       elements (rows, columns of MIXER_OUTPUT)
        """
        ...
