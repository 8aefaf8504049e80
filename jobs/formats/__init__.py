"""Input files as rows of data, results as rows of output files. No SQL and no broker here.

    for row in InputFile("prompts.jsonl").rows():
        print(row.number, row.custom_id, row.error or row.prompt)

A row without an error is accepted by `enqueue`; a row with an error is reported and stops no other row.
"""

from nightmill.jobs.formats.destination import Destination
from nightmill.jobs.formats.inputs import InputFile, rows_from
from nightmill.jobs.formats.output import ResultFile
from nightmill.jobs.formats.results import error_row, result_row
from nightmill.jobs.formats.rows import FileFormat, InputRow, RowError

__all__ = [
    "Destination",
    "FileFormat",
    "InputFile",
    "InputRow",
    "ResultFile",
    "RowError",
    "error_row",
    "result_row",
    "rows_from",
]
