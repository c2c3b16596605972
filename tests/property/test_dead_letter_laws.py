"""A step without its bad rows: state, changes and output are those of a step that never had them."""

import json
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from siltstone.aggregates.operator import Aggregate, Count, Sum
from siltstone.changelog.upload_options import UploadOptions
from siltstone.errors import BadRow
from siltstone.operator import MapState, OpaqueState, Operator, Rows, State, ValueState, WindowState
from siltstone.restore.restore import digests_of
from siltstone.run import dead_letters, processing
from siltstone.run.broadcasts import BroadcastRows
from siltstone.run.dead_letters import SortedOut
from siltstone.run.firing import StepTimers
from siltstone.run.inputs import HASH
from siltstone.run.phase_timer import PhaseTimer
from siltstone.run.spilled import Spilled
from siltstone.run.step_order import process
from siltstone.run.task import DeadLetterOrder, RestorePoint, StepTask
from siltstone.state.backend import SubtaskState
from siltstone.state.hashing import xxhash64
from siltstone.store.open import Warehouse
from tests.examples import examples
from tests.subtask import subtask

GROUPS = 8
SCHEMA = pa.schema([("k", pa.int64()), ("n", pa.int64()), ("m", pa.string())])
MOST = 2**63 - 1


class Picky(Operator):
    """Changes all of its state, and then refuses rows: of the call at hand, or by what it did before."""

    key = {"k": pa.int64()}  # noqa: RUF012
    output = pa.schema([("k", pa.int64()), ("n", pa.int64())])
    totals = ValueState(value={"sum": pa.int64()})
    entries = MapState(key={"m": pa.string()}, value={"n": pa.int64()})
    week = WindowState(value={"n": pa.int64()}, order="n")
    seen = OpaqueState(dict, lambda counts: json.dumps(counts, sort_keys=True).encode(), json.loads)

    def process(self, rows: Rows, state: State) -> pa.Table:
        n = rows.table.column("n")
        old = state.totals.get(rows.keys)["sum"].fill_null(0).to_numpy()
        sums = np.bincount(rows.key_index, weights=n.fill_null(0).to_numpy(), minlength=len(rows.keys)).astype(np.int64)
        state.totals.put(rows.keys, {"sum": old + sums})
        # Entries are not those of the call, row by row: half of them are turned round.
        order = np.concatenate([np.arange(len(rows))[::2], np.arange(len(rows))[1::2]])
        picked = rows.table.take(pa.array(order))
        state.entries.put(picked.set_column(1, "n", pa.array(np.zeros(len(rows), np.int64))))
        state.week.insert(rows.keys, rows.key_index, {"n": n})
        for group, key in zip(rows.key_groups.tolist(), rows.table.column("k").to_pylist(), strict=True):
            state.seen[group][str(key)] = state.seen[group].get(str(key), 0) + 1
        negative = (n.to_numpy() < 0) | ((old + sums)[rows.key_index] > 150)
        if negative.any():
            raise BadRow("n is negative, or too much: mend it", rows=negative, reason="no such n")
        return rows.table.select(["k", "n"])


def task_of(operator: Operator) -> StepTask:
    return StepTask(
        stream="a",
        operator=operator,
        epoch=1,
        step=1,
        base_step=0,
        base=(),
        parallelism=1,
        max_parallelism=GROUPS,
        warehouse=Warehouse.at("/nowhere"),
        backend="heap",
        tracked=(*operator.tables(), *operator.opaque_variables()),
        restore=RestorePoint(),
        checkpoint=None,
        upload=UploadOptions(),
        dead_letters=DeadLetterOrder(7, '{"batch": 3}'),
    )


def batches_of(rows: list[dict[str, Any]], size: int, schema: pa.Schema = SCHEMA) -> list[pa.RecordBatch]:
    table = pa.Table.from_pylist(rows, schema)
    hashes = xxhash64([table.column("k").combine_chunks()]) if rows else np.zeros(0, np.uint64)
    hashed = table.append_column(HASH, pa.array(hashes.view(np.int64)))
    return hashed.to_batches(max_chunksize=size)


def changes(state: SubtaskState) -> dict[str, list[dict[str, Any]]]:
    return {
        name: sorted(table.changes()[0].to_pylist(), key=lambda row: str(sorted(row.items())))
        for name, table in state.tables.items()
    }


def outcome(operator: Operator, batches: list[pa.RecordBatch], *, sorts_out: bool) -> tuple[Any, ...]:
    """(digests, changes, output, dead letters) of one step after one that left something in the state."""
    task, clock = task_of(operator), PhaseTimer()
    with subtask(operator, GROUPS) as one, TemporaryDirectory() as scratch:
        state = one.state
        state.begin(1, tracking=True)
        first = batches_of([{"k": 1, "n": 5, "m": "a"}], 1)
        shared = BroadcastRows(task, 0)
        list(process(task, state, StepTimers(task, state, clock), shared, iter(first), processing.Taken(), clock))
        for table in state.tables.values():
            table.mark()
        state.commit()
        state.begin(2, tracking=True)
        letters: list[dict[str, Any]] = []
        if sorts_out:
            # The step is begun anew as version 2 each time.
            task = replace(task, step=2)
            held = Spilled(Path(scratch) / "rows.arrow", batches)
            sorted_out = SortedOut(task, held, shared, clock, Path(scratch))
            returned, taken = sorted_out.run(state, StepTimers(task, state, clock))
            output = list(returned)
            letters = [row for each in sorted_out.letters(7, "{}") for row in each.to_pylist()]
            assert len(letters) == sorted_out.count
        else:
            taken = processing.Taken()
            output = list(process(task, state, StepTimers(task, state, clock), shared, iter(batches), taken, clock))
        state.commit()
        digests = {name: part.tolist() for name, part in digests_of(state).items()}
        rows = [row for each in output for row in each.drop_columns([processing.ACKNOWLEDGEMENT]).to_pylist()]
        assert taken.rows_out == len(rows)
        return digests, changes(state), rows, letters


ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "k": st.none() | st.integers(0, 3),
            "n": st.none() | st.integers(-3, 60),
            "m": st.none() | st.sampled_from("abc"),
        }
    ),
    max_size=14,
)


@settings(max_examples=examples(75))
@given(ROWS, st.integers(1, 5), st.integers(1, 9))
def test_a_step_without_its_bad_rows_is_one_that_never_had_them(
    rows: list[dict[str, Any]], size: int, a_call: int
) -> None:
    """Whatever was bad, is neither in the state nor in the changes that go into a delta nor in the output; and each row
    is taken or a dead letter."""
    operator = Picky(name="picky")
    with patch.object(processing, "ROWS_A_CALL", a_call), patch.object(dead_letters, "LETTERS_A_BATCH", 2):
        digests, changed, output, letters = outcome(operator, batches_of(rows, size), sorts_out=True)
        again = outcome(operator, batches_of(rows, size), sorts_out=True)
        assert again == (digests, changed, output, letters), "a task that runs again comes to the same"
        dead = [json.loads(letter["row"]) for letter in letters]
        source = iter(rows)
        assert all(row in source for row in dead), "in the order of the rows"
        good = list(rows)
        for row in dead:
            good.remove(row)
        assert all(row["k"] is not None and row["n"] is not None and row["n"] >= 0 and row["m"] for row in good)
        assert [(row["k"], row["n"]) for row in good] == [(row["k"], row["n"]) for row in output]
        clean = outcome(operator, batches_of(good, size), sorts_out=False)
        assert clean[0] == digests and clean[1] == changed


@settings(max_examples=examples(75))
@given(st.lists(st.tuples(st.none() | st.integers(0, 2), st.sampled_from([1, -1, MOST, -MOST])), max_size=10))
def test_sums_that_overflow_leave_out_the_rows_of_their_key(pairs: list[tuple[int | None, int]]) -> None:
    operator = Aggregate("sums", {"k": pa.int64()}, [Sum("total", "n", pa.int64()), Count("count")], nullable=())
    rows = [{"k": k, "n": n, "m": None} for k, n in pairs]
    digests, changed, _, letters = outcome(operator, batches_of(rows, 3), sorts_out=True)
    sums = {
        key: sum(n for k, n in pairs if k == key) + 5 * (key == 1) for key in {k for k, _ in pairs if k is not None}
    }
    fits = {key for key, total in sums.items() if -MOST - 1 <= total <= MOST}
    good = [row for row in rows if row["k"] in fits]
    assert len(letters) == len(rows) - len(good)
    reasons = {letter["reason"] for letter in letters}
    assert reasons <= {"operator sums: key column k is null", "operator sums: total of column n leaves int64"}
    assert outcome(operator, batches_of(good, 3), sorts_out=False)[:2] == (digests, changed)
