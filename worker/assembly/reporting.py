"""A model file that says how much of it a runner has read."""

import numpy as np
import numpy.typing as npt

from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.runners.starting import Progress, StartStep

__all__ = ["ReportingFile"]


class ReportingFile(GgufFile):
    """A model file that says how much of it has been read, for those who wait for it."""

    progress: Progress | None = None
    _size = 0
    _read = 0
    _said = ""

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """The tensor's bytes, as `GgufFile.raw`."""
        if self.progress is not None:
            self._size = self._size or sum(info.nbytes for info in self.tensors.values())
            share = min(self._read / self._size, 1.0)  # a runner may read a tensor twice
            if (what := f"{share:.0%} of {self._size / 1e9:.1f} GB") != self._said:
                self._said = what
                self.progress(StartStep.LOADING, what)
            self._read += self.tensors[name].nbytes if name in self.tensors else 0
        return super().raw(name)
