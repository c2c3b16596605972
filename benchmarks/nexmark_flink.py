"""Run one of NEXMark's queries on Flink: in Flink's own environment, of which this needs nothing but Flink.

    python benchmarks/nexmark_flink.py TASK

TASK is a JSON file: `number`, `backend` ("hashmap" with changelog, or "rocksdb" with incremental checkpoints),
`warm_up` and `measured` (directories with Parquet files of each kind), `work`, `jars`, `cores`, and `answers`: null, or
the directory to which the second job writes its rows as JSON. One job reads the first directory, and then one the
second, in the same JVM, each with a checkpoint per second. Prints when the second began and ended, in seconds since the
epoch: by Flink's own count of its time, without the plan and the start of the local cluster.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

TIMES = "date_time TIMESTAMP_LTZ(6)"
ROW_TIME = "row_time AS CAST(date_time AS TIMESTAMP_LTZ(3)), WATERMARK FOR row_time AS row_time - INTERVAL '1' SECOND"
"""of queries with windows: in milliseconds, as Flink wants it; the delay is that of `streams.nexmark`"""
TABLES = {
    "persons": f"id BIGINT, name STRING, email STRING, credit_card STRING, city STRING, state STRING, {TIMES}, "
    "extra STRING",
    "auctions": f"id BIGINT, item STRING, description STRING, initial_bid BIGINT, reserve BIGINT, {TIMES}, "
    "expires TIMESTAMP_LTZ(6), seller BIGINT, category BIGINT, extra STRING",
    "bids": f"auction BIGINT, bidder BIGINT, price BIGINT, channel STRING, url STRING, {TIMES}, extra STRING",
}
_OFFERS = """
    SELECT A.id, A.seller, A.category, A.expires, B.bidder, B.price, B.date_time,
        ROW_NUMBER() OVER (PARTITION BY A.id ORDER BY B.price DESC, B.date_time) AS n
    FROM auctions A JOIN bids B ON A.id = B.auction WHERE B.date_time BETWEEN A.date_time AND A.expires"""
_DAY = "DATE_FORMAT(date_time, 'yyyy-MM-dd')"
_RANKS = {
    "bids": "",
    "rank1": "FILTER (WHERE price < 10000)",
    "rank2": "FILTER (WHERE price >= 10000 AND price < 1000000)",
    "rank3": "FILTER (WHERE price >= 1000000)",
}


def _ranked(counted: str, prefix: str = "") -> str:
    """Return the counts of all bids, and of those of each rank."""
    return ", ".join(f"COUNT({counted}) {rank} AS {prefix}{name}" for name, rank in _RANKS.items())


_DAILY = f"{_ranked('*')}, {_ranked('DISTINCT bidder', 'bidders_')}, {_ranked('DISTINCT auction', 'auctions_')}"


def _window(name: str, kind: str, *sizes_s: int) -> str:
    """Return the rows of a kind in windows."""
    sizes = ", ".join(f"INTERVAL '{size}' SECOND" for size in sizes_s)
    return f"TABLE({name}(TABLE {kind}, DESCRIPTOR(row_time), {sizes}))"


_COUNTS = f"""SELECT auction, window_start, window_end, COUNT(*) AS bids FROM {_window("HOP", "bids", 2, 10)}
    GROUP BY auction, window_start, window_end"""
QUERIES = {
    0: "SELECT auction, bidder, price, date_time, extra FROM bids",
    1: "SELECT auction, bidder, date_time, extra, CAST(price AS DOUBLE) * 0.908E0 AS price FROM bids",
    2: "SELECT auction, price FROM bids WHERE MOD(auction, 123) = 0",
    3: """SELECT P.name, P.city, P.state, A.id FROM auctions A JOIN persons P ON A.seller = P.id
        WHERE A.category = 10 AND P.state IN ('OR', 'ID', 'CA')""",
    4: """SELECT category, AVG(price) AS price FROM (
            SELECT MAX(B.price) AS price, A.category FROM auctions A JOIN bids B ON A.id = B.auction
            WHERE B.date_time BETWEEN A.date_time AND A.expires GROUP BY A.id, A.category
        ) GROUP BY category""",
    5: f"""SELECT C.window_end, C.auction, C.bids FROM ({_COUNTS}) C JOIN (
            SELECT window_start, window_end, MAX(bids) AS most FROM ({_COUNTS}) GROUP BY window_start, window_end
        ) M ON C.window_start = M.window_start AND C.window_end = M.window_end AND C.bids >= M.most""",
    7: f"""SELECT M.window_end, B.auction, B.price, B.date_time, B.bidder FROM bids B JOIN (
            SELECT window_end, window_time, MAX(price) AS most FROM {_window("TUMBLE", "bids", 10)}
            GROUP BY window_start, window_end, window_time
        ) M ON B.price = M.most AND B.row_time BETWEEN M.window_time - INTERVAL '9.999' SECOND AND M.window_time""",
    8: f"""SELECT P.id AS person, P.name FROM (
            SELECT id, name, window_start, window_end FROM {_window("TUMBLE", "persons", 10)}
            GROUP BY id, name, window_start, window_end
        ) P JOIN (
            SELECT seller, window_start, window_end FROM {_window("TUMBLE", "auctions", 10)}
            GROUP BY seller, window_start, window_end
        ) A ON P.id = A.seller AND P.window_start = A.window_start AND P.window_end = A.window_end""",
    9: f"SELECT id, seller, category, expires, bidder, price, date_time FROM ({_OFFERS}) WHERE n <= 1",
    11: """SELECT bidder, SESSION_START(row_time, INTERVAL '10' SECOND) AS window_start,
            SESSION_END(row_time, INTERVAL '10' SECOND) AS window_end, COUNT(*) AS bids
        FROM bids GROUP BY bidder, SESSION(row_time, INTERVAL '10' SECOND)""",
    15: f"SELECT {_DAY} AS theday, {_DAILY} FROM bids GROUP BY {_DAY}",
    16: f"SELECT channel, {_DAY} AS theday, {_DAILY} FROM bids GROUP BY channel, {_DAY}",
    17: f"""SELECT auction, {_DAY} AS theday, {_ranked("*")},
            MIN(price) AS least, MAX(price) AS most, AVG(price) AS mean, SUM(price) AS total
        FROM bids GROUP BY auction, {_DAY}""",
    18: """SELECT auction, bidder, price, channel, url, date_time FROM (
            SELECT *, ROW_NUMBER() OVER (PARTITION BY bidder, auction ORDER BY date_time DESC) AS n FROM bids
        ) WHERE n <= 1""",
    19: """SELECT auction, bidder, price, channel, date_time, n FROM (
            SELECT *, ROW_NUMBER() OVER (PARTITION BY auction ORDER BY price DESC, date_time) AS n FROM bids
        ) WHERE n <= 10""",
    20: """SELECT B.auction, B.bidder, B.price, B.date_time, B.url, A.item, A.initial_bid, A.expires, A.seller
        FROM bids B JOIN auctions A ON B.auction = A.id WHERE A.category = 10""",
    22: """SELECT auction, bidder, price, channel, SPLIT_INDEX(url, '/', 3) AS dir1, SPLIT_INDEX(url, '/', 4) AS dir2,
        SPLIT_INDEX(url, '/', 5) AS dir3 FROM bids""",
}
WINDOWED = (5, 7, 8, 11)
"""those that close windows by a watermark, and so need events in their order"""
_CHANGELOG = {
    "state.changelog.enabled": "true",
    "state.changelog.storage": "filesystem",
}


def main(task: dict[str, Any]) -> None:
    """Run the query twice; print when the second job began and ended."""
    from pyflink.common import Configuration  # pyright: ignore[reportMissingImports]
    from pyflink.table import EnvironmentSettings, TableEnvironment  # pyright: ignore[reportMissingImports]

    work = Path(task["work"]).resolve().as_uri()
    settings = {
        "pipeline.jars": ";".join(Path(jar).resolve().as_uri() for jar in task["jars"]),
        "parallelism.default": str(task["cores"]),
        "execution.checkpointing.interval": "1 s",
        "execution.checkpointing.dir": f"{work}/checkpoints",
        "execution.checkpointing.incremental": "true",
        # Not, as in NEXMark's own settings; but a file is only finished by a checkpoint.
        "execution.checkpointing.checkpoints-after-tasks-finish": str(bool(task["answers"])).lower(),
        "taskmanager.memory.managed.size": "1g",
        "state.backend.type": task["backend"],
        "table.local-time-zone": "UTC",
    }
    if task["backend"] == "hashmap":
        settings |= _CHANGELOG | {"state.changelog.dstl.dfs.base-path": f"{work}/changelog"}
    for directory in (task["warm_up"], task["measured"]):
        configuration = Configuration()
        for name, value in settings.items():
            configuration.set_string(name, value)
        chosen = EnvironmentSettings.new_instance().in_streaming_mode().with_configuration(configuration).build()
        tables = TableEnvironment.create(chosen)
        for kind in (path.name for path in Path(directory).iterdir()):
            files = f"'connector' = 'filesystem', 'path' = '{Path(directory).resolve() / kind}', 'format' = 'parquet'"
            columns = f"{TABLES[kind]}, {ROW_TIME}" if task["number"] in WINDOWED else TABLES[kind]
            tables.execute_sql(f"CREATE TABLE {kind} ({columns}) WITH ({files})")
        sink = "'connector' = 'blackhole'"
        if task["answers"] and directory == task["measured"]:
            sink = f"'connector' = 'filesystem', 'path' = '{Path(task['answers']).resolve()}', 'format' = 'json'"
        result = tables.execute_sql(f"CREATE TABLE answer WITH ({sink}) AS {QUERIES[task['number']]}")
        result.wait()
        ended_s = time.time()
        ran = result.get_job_client().get_job_execution_result().result()
    print(json.dumps([ended_s - ran.get_net_runtime() / 1000, ended_s]))  # pyright: ignore[reportPossiblyUnboundVariable]


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
