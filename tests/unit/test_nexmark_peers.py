"""What the benchmark's other systems answer to NEXMark's queries is what SQL answers over all events."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks import flink, nexmark, nexmark_feldera
from benchmarks.nexmark_flink import WINDOWED
from benchmarks.workload import FILES_A_STEP
from siltstone.times import to_us
from streams.nexmark import QUERIES
from streams.nexmark.events import PER_EPOCH, Events
from tests.nexmark_answers import answer_of

pytestmark = pytest.mark.slow
STEPS, EPOCHS = 12, 20
EVENTS = Events(seed=7, rate=400, out_of_order=400)
"""half a minute"""


def made(kind: str, first: int, last: int) -> pa.Table:
    return EVENTS.make(kind, np.arange(first * PER_EPOCH[kind], last * PER_EPOCH[kind]))


def write(number: int, inputs: Path) -> None:
    """Write what the program reads: a query's events, those of some epochs in each step."""
    inputs.mkdir()
    (inputs / "query").write_text(str(number))
    (inputs / "steps").write_text(json.dumps([1, STEPS - 1]))
    for kind in QUERIES[number].source_names:
        (inputs / kind).mkdir()
        for step in range(STEPS):
            rows = made(kind, step * EPOCHS, (step + 1) * EPOCHS)
            for part, places in enumerate(np.array_split(np.arange(len(rows)), FILES_A_STEP)):
                path = inputs / kind / f"{step * FILES_A_STEP + part:06d}.parquet"
                pq.write_table(rows.take(pa.array(places)), path)


def flat(row: Mapping[str, Any]) -> Iterator[list[Any]]:
    """A row's columns; of one that ends with a list of rows, the columns before it with each of those."""
    *columns, last = row.values()
    for each in last if isinstance(last, list) else [{"": last}]:
        yield [plain(value) for value in (*columns, *each.values())]


def plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return to_us(value)
    return float(f"{value:.10g}") if isinstance(value, float) else value


@pytest.mark.skipif(not nexmark_feldera.is_built(), reason="needs DBSP: make feldera")
@pytest.mark.parametrize("number", nexmark_feldera.QUERIES)
def test_a_circuit_answers_what_sql_does(number: int, tmp_path: Path) -> None:
    write(number, tmp_path / "input")
    began_s, ended_s = nexmark_feldera.run(tmp_path / "input", tmp_path / "answers")
    found = Counter(repr([plain(value) for value in json.loads(line)]) for line in (tmp_path / "answers").open())
    events = {kind: made(kind, 0, STEPS * EPOCHS) for kind in PER_EPOCH}
    expected = Counter(repr(columns) for row in answer_of(number, events) for columns in flat(row))
    assert expected and found == expected
    assert began_s < ended_s


@pytest.mark.skipif(not flink.jars(), reason="needs Flink: make nexmark")
@pytest.mark.parametrize("number", WINDOWED)
def test_flink_closes_windows_as_sql_does_and_drops_nothing_as_late(number: int, tmp_path: Path) -> None:
    write(number, tmp_path / "input")
    answers = tmp_path / "answers"
    nexmark.run_flink("flink", tmp_path / "input", tmp_path, tmp_path / "result", answers)
    found = [json.loads(line) for path in answers.rglob("part-*") for line in path.read_text().splitlines()]
    # Its second job, whose answer this is, begins without the events of the warm-up.
    events = {kind: made(kind, EPOCHS, STEPS * EPOCHS) for kind in QUERIES[number].source_names}
    expected = [{name: row[name] for name in found[0]} for row in answer_of(number, events)]
    assert expected and in_ms(found) == in_ms(expected)


def in_ms(rows: list[dict[str, Any]]) -> Counter[str]:
    """Rows in no order, their times to the millisecond, as Flink has them."""
    return Counter(repr({name: _in_ms(value) for name, value in row.items()}) for row in rows)


def _in_ms(value: Any) -> Any:
    if isinstance(value, str) and value[:2] == "20":
        value = datetime.fromisoformat(value)
    return value.strftime("%F %T.%f")[:-3] if isinstance(value, datetime) else value
