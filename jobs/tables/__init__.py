"""From a table to a table: prompts from a template over columns, answers beside columns that were kept.

`options` is what was asked for, `template` the parsed text. `reading` opens files (CSV, TSV, JSON lines,
Parquet, Arrow), `memory` tables of Python programs; `columns` are theirs and their kinds, and `rows` makes
rows of a batch. `shape` says which columns results have, and is part of the batch's settings; `layout` writes
them in any format, through `arrow_files` with types.
"""
