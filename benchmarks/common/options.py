"""The options --dtype, --weights and --kv of benchmarks, as a worker's."""

import argparse

from nightmill.jobs.base.settings import Settings
from nightmill.worker.assembly.options import DTYPES
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.spec import ModelSpec
from nightmill.worker.runners.gpu.element_choice import choose_element
from nightmill.worker.runners.gpu.precision import Precision, WeightsFormat
from nightmill.worker.runners.kv_format import KvFormat

__all__ = ["add_formats", "precision_from"]


def add_formats(arguments: argparse.ArgumentParser) -> None:
    """Add the options; defaults are a worker's."""
    usual = Settings()
    arguments.add_argument("--dtype", choices=DTYPES.choices, default=usual.dtype, help="as a worker's")
    arguments.add_argument(
        "--weights", choices=[one.value for one in WeightsFormat], default=usual.weights, help="as a worker's"
    )
    arguments.add_argument(
        "--kv", choices=[one.value for one in KvFormat], default=usual.kv, help="as a worker's"
    )


def precision_from(options: argparse.Namespace, file: GgufFile, spec: ModelSpec) -> Precision:
    """What a worker would be told by the same options."""
    element = choose_element(file, spec, options.dtype).element
    return Precision(element, WeightsFormat(options.weights), KvFormat(options.kv))
