"""The dialect of a CSV: results come back as the input was written."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Final, Self

from nightmill.jobs.base.contract import JsonObject

DELIMITERS: Final = ",;\t|"
BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
"""The beginning of a CSV that Excel reads as UTF-8."""
CSV: Final = "csv"
"""The key of a batch's settings for a dialect that is not the usual one; not part of the batch's identity."""


@dataclass(frozen=True)
class Dialect:
    """The delimiter, and whether a byte order mark comes first."""

    delimiter: str = ","
    mark: bool = False

    @classmethod
    def of(cls, settings: Mapping[str, Any] | None) -> Self:
        """Read the dialect of a batch's settings."""
        said = (settings or {}).get(CSV)
        if not isinstance(said, Mapping) or said.get("delimiter") not in tuple(DELIMITERS):
            return cls()
        return cls(str(said["delimiter"]), bool(said.get("byte_order_mark")))

    def settings(self) -> JsonObject:
        """Return the settings of a batch that say so, for `of`; none for the usual dialect."""
        if self == Dialect():
            return {}
        return {CSV: {"delimiter": self.delimiter, "byte_order_mark": self.mark}}

    def named(self, path: PurePath | str | None) -> "Dialect":
        """Return the dialect of results in a file of this name: tabs in `.tsv`, and none in `.csv`."""
        suffix = "" if path is None else PurePath(path).suffix.lower()
        if suffix == ".tsv":
            return Dialect("\t", self.mark)
        return Dialect(",", self.mark) if suffix == ".csv" and self.delimiter == "\t" else self

    def or_others(self) -> Iterator["Dialect"]:
        """Yield this dialect, then all others that results may have."""
        yield self
        for mark in (False, True):
            yield from (Dialect(delimiter, mark) for delimiter in DELIMITERS)
