"""The table of responses: one row per response and mini-batch, which is all that a run or an audit records of a loss.

A *folder* holds the rows of one training, or of several starts that know nothing of each other. Its files are

* closed parts, ``responses-RUN-RANK-FIRST-LAST.parquet``: complete, compressed, merged into larger ones as they grow;
* one open part of each rank, ``_responses-RUN-RANK-NUMBER.arrow``: an Arrow stream that gains a batch with each append.

Parts are numbered by the stream that they were. A closed part supersedes the stream of its number, and every part whose
numbers it contains. A kill between writing, renaming and deleting therefore leaves nothing that counts twice: readers
leave out what is superseded, and the same writer removes it when it opens the folder again. ``pandas.read_parquet``
reads all closed parts of a folder in one line; names that begin with ``_`` are none of its files.

Names of columns stand in the file, so that a new column needs no new layout. pyarrow is imported where a file is
written or read, because every worker of verl imports this package. The layout is defined here.
"""

from __future__ import annotations

from fspo.table.parts import COLUMNS, FOLDER, NEEDED, OCTAVES, Rows, join_rows
from fspo.table.reader import Table, holds_table, read_table
from fspo.table.writer import TableWriter

__all__ = [
    "COLUMNS",
    "FOLDER",
    "NEEDED",
    "OCTAVES",
    "Rows",
    "Table",
    "TableWriter",
    "holds_table",
    "join_rows",
    "read_table",
]
