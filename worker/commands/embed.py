"""`nightmill embed`: a table of texts into a table of their embeddings."""

from typing import Any

import click

from nightmill.jobs.tables.options import EMBEDDING
from nightmill.worker.assembly.options import WORKER_SETTINGS
from nightmill.worker.commands.run import run

_OF_RUN = WORKER_SETTINGS | {
    "file", "query", "from_url", "output", "errors", "format", "into", "name", "retry_failed", "overwrite",
    "keep", "empty", "on_end", "on_end_seconds", "webhook", "log_format", "as_json", "dimensions", "pooling",
    "truncate_prompt_tokens", "priority", "max_attempts", "deadline", "reuse",
}  # fmt: skip
"""The options of `nightmill run` that this command has, too."""


@click.command()
@click.option("--column", "text_column", required=True, metavar="NAME", help="The column of the texts.")
@click.option(
    "--as",
    "embedding_column",
    default=EMBEDDING,
    show_default=True,
    metavar="NAME",
    help="What the column of embeddings is called.",
)
@click.pass_context
def embed(context: click.Context, /, text_column: str, embedding_column: str, **options: Any) -> None:
    """Compute the embedding of a column of FILE for each row, and write it beside the other columns.

    \b
      nightmill embed papers.parquet --column abstract -o embedded.parquet --model qwen3-embedding.gguf

    FILE is any table (CSV, TSV, JSON lines, Parquet, Arrow), and OUTPUT one in the format that its name ends
    in: embeddings are lists of float32 in Parquet and Arrow, lists in JSON lines, and JSON in CSV. The model
    must be one for embeddings, such as Qwen3-Embedding, unless --pooling says how hidden states become one.
    docs/embeddings.md says what is computed.

    All else is as for nightmill run: a worker is started unless one serves the model, the same command goes
    on after an interruption, rows that cannot be embedded go to the file of errors, and exit codes are the
    same.
    """
    if "`" in text_column or "\n" in text_column:
        raise click.BadParameter(
            "must have neither ` nor a line break; rename the column", param_hint="--column"
        )
    template = f"{{{{ `{text_column}` }}}}"
    renamed = {"template": "--column"}
    context.invoke(run, template=template, column=embedding_column, embed=True, renamed=renamed, **options)


embed.params += [option for option in run.params if option.name in _OF_RUN]
