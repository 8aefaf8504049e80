"""Records that the host writes and kernels read: one layout, of which nvcc is told as members of a struct."""

import ctypes
from typing import Any

import numpy as np
import pytest

from nightmill.worker.runners.base import DRAW
from nightmill.worker.runners.gpu.device.sources import members
from nightmill.worker.runners.gpu.sampling.sampler import SLOT

KINDS = {"int": ctypes.c_int, "float": ctypes.c_float, "unsigned long long": ctypes.c_ulonglong}


@pytest.mark.parametrize("record", [SLOT, DRAW], ids=["SLOT", "DRAW"])
def test_kernels_find_the_members_of_a_record_where_numpy_puts_them(record: np.dtype[Any]) -> None:
    declared = members("MEMBERS", record).removeprefix("-DMEMBERS=").rstrip(";").split("; ")
    fields = [(name, KINDS[kind]) for kind, name in (member.rsplit(" ", 1) for member in declared)]
    struct = type("Struct", (ctypes.Structure,), {"_fields_": fields})  # laid out by the rules of C
    offsets = {name: getattr(struct, name).offset for name, _ in fields}
    assert offsets == {name: offset for name, (_, offset, *_) in record.fields.items()}
    assert ctypes.sizeof(struct) == record.itemsize


def test_a_record_that_c_would_lay_out_otherwise_is_refused() -> None:
    with pytest.raises(ValueError, match="not laid out as a struct of C"):
        members("MEMBERS", np.dtype([("a", np.int32), ("b", np.uint64)]))
