"""What joins should return: SQL over all rows at once, by DuckDB, which knows no steps.

The tables have the columns of `tests.join_streams.SCHEMA`, with the key as `k`. Where SQL or DuckDB means something
else than the joins do, the queries say so:

    a null key       is a bad row in every kind of join; in SQL it equals nothing, and an outer join returns its row
    a late row       was before the watermark (`Batch.before`), of which SQL knows nothing
    NaN              is equal to itself and the greatest number in DuckDB, as in Spark and in our order of versions. In
                     Arrow's comparisons, by which the condition `less` is computed, it is less than nothing
    -0.0             equals 0.0 everywhere. Which of the two a result has cannot be told here: joins return 0.0
    versions at one  time: a lookup takes the one with the greatest columns, null first; SQL has to be told
    times            are instants. An interval of SQL goes by the clocks of the session's zone, so that is UTC
"""

from collections import Counter
from collections.abc import Iterable
from functools import cache
from typing import Any

import duckdb
import pyarrow as pa

from tests.join_streams import SCHEMA, TIME, Ask, Batch, Bid, Row, count_rows

_ACCEPTED = """
    WITH asks AS (SELECT * FROM all_asks WHERE k IS NOT NULL AND (before IS NULL OR all_asks.at >= before)),
         bids AS (SELECT * FROM all_bids WHERE k IS NOT NULL AND (before IS NULL OR all_bids.at >= before))
"""
_COLUMNS = {
    "inner": "asks.k, asks.at, asks.until, asks.a, bids.at, bids.b",
    "left": "asks.k, asks.at, asks.until, asks.a, bids.at, bids.b",
    "right": "bids.k, asks.at, asks.until, asks.a, bids.at, bids.b",
    "full": "coalesce(asks.k, bids.k), asks.at, asks.until, asks.a, bids.at, bids.b",
    "semi": "asks.k, asks.at, asks.until, asks.a",
    "anti": "asks.k, asks.at, asks.until, asks.a",
}
"""how -> what it returns"""
_LOOKUP = """
    SELECT asks.k, asks.at, asks.until, asks.a, version.since, version.b
    FROM asks {how} JOIN LATERAL (
        SELECT bids.at AS since, bids.b FROM bids
        WHERE bids.k = asks.k AND bids.at <= asks.at
        ORDER BY bids.at DESC, bids.b DESC NULLS LAST LIMIT 1
    ) AS version ON true
"""


def join_answer(
    batches: list[Batch], how: str, bounds: tuple[int, int | str], *, where: bool
) -> "Counter[tuple[Any, ...]]":
    """Join the rows of all batches that are close in time, as `tests.join_streams.interval_join` is declared to."""
    lower, upper = bounds
    last = f"asks.{upper}" if isinstance(upper, str) else f"asks.at + INTERVAL ({upper}) MINUTE"
    condition = f"asks.k = bids.k AND bids.at BETWEEN asks.at + INTERVAL ({lower}) MINUTE AND {last}"
    if where:
        condition += " AND asks.a < bids.b AND NOT isnan(bids.b)"
    return _ask(batches, f"SELECT {_COLUMNS[how]} FROM asks {how} JOIN bids ON {condition}")


def lookup_answer(batches: list[Batch], how: str) -> "Counter[tuple[Any, ...]]":
    """Join each ask with the newest bid of its key that is not later than it."""
    return _ask(batches, _LOOKUP.format(how=how))


def newest_versions(batches: list[Batch]) -> "Counter[tuple[Any, ...]]":
    """Return the key and time of each key's newest bid."""
    return _ask(batches, "SELECT bids.k, max(bids.at) FROM bids GROUP BY bids.k")


def count_refused(batches: list[Batch]) -> tuple[int, int]:
    """Return how many rows have a null key, and how many of the others are late."""
    query = """
        SELECT count(*) FILTER (k IS NULL), count(*) FILTER (k IS NOT NULL AND moment < before)
        FROM (SELECT k, all_asks.at AS moment, before FROM all_asks
              UNION ALL SELECT k, all_bids.at, before FROM all_bids)
    """
    [(bad, late)] = _ask(batches, query)
    return bad, late


@cache
def _connection() -> duckdb.DuckDBPyConnection:
    """A database of this process, in memory, which fetches no extension."""
    made = duckdb.connect(config={"threads": 1, "autoinstall_known_extensions": False})
    made.execute("SET TimeZone = 'UTC'")
    return made


def _ask(batches: list[Batch], query: str) -> "Counter[tuple[Any, ...]]":
    """Return the rows of a query over all rows, each with how often it is there."""
    connection = _connection()
    connection.register("all_asks", _table_of("asks", ((batch, batch.asks) for batch in batches)))
    connection.register("all_bids", _table_of("bids", ((batch, batch.bids) for batch in batches)))
    return count_rows(connection.execute(_ACCEPTED + query).fetchall())


def _table_of(source: str, given: Iterable[tuple[Batch, list[Ask] | list[Bid]]]) -> pa.Table:
    """Make the table of a source's rows, each with the watermark before its step."""
    rows: list[Row] = [(*row, batch.before) for batch, each in given for row in each]
    names = ["k", *list(SCHEMA[source])[1:], "before"]
    types = [pa.float64(), *list(SCHEMA[source].values())[1:], TIME]  # which has all keys, whole ones too
    columns = list(zip(*rows, strict=True)) or [()] * len(names)
    return pa.table([pa.array(column, type) for column, type in zip(columns, types, strict=True)], names)
