"""Sizes of models that people run, and their specs, without files.

`real_models.csv` has them, from the models' config.json. A test adds up the parameters that follow from each
line and holds them against the published number, so a wrong width, layer, head or vocabulary does not pass.
"""

import csv
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from nightmill.worker.model.spec import ModelSpec
from tests.support.family_models import MODELS, Heads, Size, sized_spec

__all__ = ["REAL_MODELS", "RealModel"]


@dataclass(frozen=True, slots=True)
class RealModel:
    """A published model.

    like      the entry of `tests.support.family_models.MODELS` that computes as it does
    millions  of parameters, as published
    """

    name: str
    like: str
    size: Size
    tied: bool
    millions: float

    @property
    def spec(self) -> ModelSpec:
        """The model as data, without tensor types."""
        like = MODELS[self.like].like
        return replace(sized_spec(like, self.size), name=self.name, tied_head=self.tied)


@cache
def _read() -> tuple[RealModel, ...]:
    with Path(__file__).with_suffix(".csv").open(newline="") as table:
        return tuple(_model(line) for line in csv.DictReader(table))


def _model(line: dict[str, str]) -> RealModel:
    heads = Heads(*(int(line[name]) for name in ("heads", "kv_heads", "head_size")))
    size = Size(
        layers=int(line["layers"]),
        vocab=int(line["vocabulary"]),
        context=4096,
        heads=heads,
        width=int(line["width"]),
        ffn=int(line["ffn"]),
    )
    return RealModel(line["name"], line["like"], size, line["tied"] == "yes", float(line["millions"]))


REAL_MODELS = _read()
