"""A worker whose products of packed weights fail at its start, as FAULT says, unless they are plain ones.

wrong  a result is another number
trap   a kernel reads from a wild address
hang   a kernel never ends
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nightmill.jobs.base.settings import Settings
from nightmill.worker.assembly.engine import build_engine
from nightmill.worker.assembly.model import OpenModel
from nightmill.worker.engine.engine import Engine
from nightmill.worker.runners.gpu import runner as gpu_runner
from nightmill.worker.runners.gpu import self_test
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.functions import Module
from nightmill.worker.runners.gpu.device.operands import Buffer, Matrix
from nightmill.worker.runners.gpu.products.chooser import Product
from nightmill.worker.runners.starting import StartStep
from tests.support.own_engine import run_module

NAME = "tests.gpu.failing_products_worker"
COMMAND = (sys.executable, "-m", NAME)
FAULTS = ("wrong", "trap", "hang")
SELF_TEST_SECONDS = 5.0

check_products = self_test.check_products
multiply = Product.__call__


def check_with_a_fault(device: Device, products: list[Any], progress: Callable[[str], None]) -> None:
    """As `check_products`, with a fault behind each product."""
    faults = Module.of(device, (Path(__file__).with_name("faults.cu"), ()))
    fault = faults.function(os.environ["FAULT"], "P")

    def multiply_and_fail(self: Product, x: Buffer, weight: Matrix, y: Buffer, rows: int) -> None:
        multiply(self, x, weight, y, rows)
        fault((1, 1), (1, 1, 1), y.address)

    Product.__call__ = multiply_and_fail  # type: ignore[method-assign]
    try:
        check_products(device, products, progress)
    finally:
        Product.__call__ = multiply  # type: ignore[method-assign]


def build_failing(settings: Settings, model: OpenModel) -> Engine:
    """As `build_engine`, with that fault where products are not plain."""
    if not model.plain_products:
        gpu_runner.check_products = check_with_a_fault  # type: ignore[assignment]
    return build_engine(settings, model)


if __name__ == "__main__":
    seconds = {step: step.seconds for step in StartStep} | {StartStep.SELF_TEST: SELF_TEST_SECONDS}
    StartStep.seconds = property(lambda step: seconds[step])  # type: ignore[assignment, method-assign]
    run_module(NAME, build_failing)
