"""The answers of NEXMark's queries, as SQL of DuckDB over tables of all events: `persons`, `auctions`, `bids`, `side`.

Where a query's output tells the same thing again and again, `NEWEST` names the columns whose newest row counts.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import duckdb
import pyarrow as pa

_COUNTS = """count(*) AS bids, count(*) FILTER (price < 10000) AS rank1,
    count(*) FILTER (price >= 10000 AND price < 1000000) AS rank2, count(*) FILTER (price >= 1000000) AS rank3"""
_DISTINCT = ", ".join(
    f"count(DISTINCT {column}) FILTER ({condition}) AS {what}_{name}"
    for what, column in (("bidders", "bidder"), ("auctions", "auction"))
    for name, condition in (
        ("bids", "true"),
        ("rank1", "price < 10000"),
        ("rank2", "price >= 10000 AND price < 1000000"),
        ("rank3", "price >= 1000000"),
    )
)
_DAY_END = "time_bucket(INTERVAL 1 DAY, date_time) + INTERVAL 1 DAY AS window_end"
_WINDOW = "time_bucket(INTERVAL 10 SECONDS, {0})"
_WINNERS = """
    SELECT * EXCLUDE n FROM (
        SELECT a.id AS auction, a.seller, a.category, a.expires, b.date_time, b.bidder, b.price,
            row_number() OVER (PARTITION BY a.id ORDER BY b.price DESC, b.date_time, b.bidder) AS n
        FROM auctions a
        JOIN bids b ON a.id = b.auction AND b.date_time BETWEEN a.date_time AND a.expires
    ) WHERE n = 1"""
_CHANNEL_ID = "regexp_extract(url, '(&|^|\\?)channel_id=([^&]*)', 2)"

ANSWERS = {
    0: "SELECT auction, bidder, price, date_time, extra FROM bids",
    1: "SELECT auction, bidder, date_time, extra, price::DOUBLE * 0.908::DOUBLE AS price FROM bids",
    2: "SELECT auction, price FROM bids WHERE auction % 123 = 0",
    3: """SELECT a.seller, p.name, p.city, p.state, a.id, a.category FROM auctions a JOIN persons p ON a.seller = p.id
        WHERE a.category = 10 AND p.state IN ('OR', 'ID', 'CA')""",
    4: f"SELECT category, avg(price) AS mean FROM ({_WINNERS}) GROUP BY category",
    5: """
        WITH counts AS (
            SELECT auction, time_bucket(INTERVAL 2 SECONDS, date_time) + to_seconds(2 * n) AS window_end,
                count(*) AS bids
            FROM bids, generate_series(1, 5) AS s(n) GROUP BY ALL
        )
        SELECT window_end, auction, bids FROM counts
        QUALIFY bids = max(bids) OVER (PARTITION BY window_end)""",
    6: f"""
        SELECT seller, avg(price) AS mean FROM (
            SELECT *, row_number() OVER (PARTITION BY seller ORDER BY expires DESC, auction) AS newest FROM ({_WINNERS})
        ) WHERE newest <= 10 GROUP BY seller""",
    7: f"""
        WITH firsts AS (
            SELECT *, {_WINDOW.format("date_time")} + INTERVAL 10 SECONDS AS window_end FROM bids
            QUALIFY row_number() OVER (PARTITION BY auction, window_end ORDER BY price DESC, date_time, bidder) = 1
        )
        SELECT window_end, auction, price, date_time, bidder FROM firsts
        QUALIFY price = max(price) OVER (PARTITION BY window_end)""",
    8: f"""SELECT DISTINCT p.id AS person, p.date_time, p.name FROM persons p JOIN auctions a ON p.id = a.seller
        AND {_WINDOW.format("p.date_time")} = {_WINDOW.format("a.date_time")}""",
    9: _WINNERS,
    10: """SELECT auction, bidder, price, date_time, extra, strftime(date_time, '%Y-%m-%d') AS day,
        strftime(date_time, '%H:%M') AS minute FROM bids""",
    11: """
        WITH marked AS (
            SELECT bidder, date_time, date_time > lag(date_time) OVER w + INTERVAL 10 SECONDS IS NOT FALSE AS begins
            FROM bids WINDOW w AS (PARTITION BY bidder ORDER BY date_time)
        ), numbered AS (SELECT *, sum(begins::INT) OVER (PARTITION BY bidder ORDER BY date_time) AS session FROM marked)
        SELECT bidder, min(date_time) AS window_start, max(date_time) + INTERVAL 10 SECONDS AS window_end,
            count(*) AS bids FROM numbered GROUP BY bidder, session""",
    13: "SELECT auction, bidder, price, date_time, value FROM bids JOIN side ON slot = auction % 10000",
    14: """
        SELECT auction, bidder, date_time, extra, price::DOUBLE * 0.908::DOUBLE AS price,
            CASE WHEN hour(date_time) BETWEEN 8 AND 18 THEN 'dayTime'
                WHEN hour(date_time) <= 6 OR hour(date_time) >= 20 THEN 'nightTime' ELSE 'otherTime' END AS time_of_day,
            length(extra) - length(replace(extra, 'c', '')) AS letters
        FROM bids WHERE price::DOUBLE * 0.908::DOUBLE > 1000000 AND price::DOUBLE * 0.908::DOUBLE < 50000000""",
    15: f"SELECT {_DAY_END}, {_COUNTS}, {_DISTINCT} FROM bids GROUP BY window_end",
    16: f"SELECT {_DAY_END}, channel, {_COUNTS}, {_DISTINCT} FROM bids GROUP BY window_end, channel",
    17: f"""
        SELECT auction, time_bucket(INTERVAL 1 DAY, date_time) AS window_start, {_DAY_END}, {_COUNTS},
            min(price) AS least, max(price) AS most, avg(price) AS mean, sum(price)::BIGINT AS total
        FROM bids GROUP BY auction, window_start, window_end""",
    18: """SELECT bidder, auction, [{date_time: date_time, price: price, channel: channel, url: url}] AS bids FROM bids
        QUALIFY row_number() OVER (PARTITION BY bidder, auction ORDER BY date_time DESC, price, channel, url) = 1""",
    19: """
        WITH ranked AS (
            SELECT *, row_number() OVER (PARTITION BY auction ORDER BY price DESC, date_time, bidder, channel) AS n
            FROM bids
        )
        SELECT auction, list({price: price, date_time: date_time, bidder: bidder, channel: channel} ORDER BY n) AS bids
        FROM ranked WHERE n <= 10 GROUP BY auction""",
    20: """
        SELECT b.auction, a.item, a.initial_bid, a.expires, a.seller, a.category, b.bidder, b.price, b.date_time, b.url
        FROM bids b JOIN auctions a ON a.id = b.auction WHERE a.category = 10""",
    21: f"""
        SELECT auction, bidder, price, channel, CASE lower(channel) WHEN 'apple' THEN '0' WHEN 'google' THEN '1'
            WHEN 'facebook' THEN '2' WHEN 'baidu' THEN '3' ELSE {_CHANNEL_ID} END AS channel_id
        FROM bids WHERE channel_id <> ''""",
    22: """SELECT auction, bidder, price, channel, split_part(url, '/', 4) AS dir1, split_part(url, '/', 5) AS dir2,
        split_part(url, '/', 6) AS dir3 FROM bids""",
}
NEWEST = {
    4: ["category"],
    6: ["seller"],
    17: ["auction", "window_start"],
    18: ["bidder", "auction"],
    19: ["auction"],
}


def answer_of(number: int, events: Mapping[str, pa.Table]) -> list[dict[str, Any]]:
    """A query's answer over all events of each kind."""
    with duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'")
        for kind, table in events.items():
            connection.register(kind, table)
        return connection.sql(ANSWERS[number]).to_arrow_table().to_pylist()


def as_rows(rows: list[dict[str, Any]]) -> Counter[str]:
    """Rows in no order, floats to ten digits."""
    return Counter(repr(_plain(row)) for row in rows)


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.10g}")
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in sorted(value.items())}
    return value
