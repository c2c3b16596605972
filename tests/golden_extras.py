"""Further warehouses that are kept as Siltstone wrote them, of what `golden_warehouse` has nothing of: one of files,
whose sink is a Delta table, with a savepoint that was exported; and one in RocksDB, whose larger values lie in chunks.

The region has an operator with nullable keys and nested values, which prepares for each checkpoint, and dead letters;
beside it is an autonomous operator. The outputs of the newest checkpoint are staged and not delivered.
"""

import json
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.materialize import materialize
from siltstone.chains.policies import PolicyOptions, policy_by_name
from siltstone.change.export_savepoint import export_savepoint
from siltstone.errors import BadRow
from siltstone.format.output import read_output
from siltstone.operator import CheckpointWriter, MapState, Operator, OperatorCheckpoint, Rows, State, ValueState
from siltstone.retention.savepoints import set_savepoint
from siltstone.sinks.delta import SinkTable
from siltstone.stream import DEAD_LETTERS, Autonomous, Stream
from tests.golden_warehouse import contents, pack, unpack
from tests.proofs import in_order
from tests.region_run import RegionRun

NAME, OPERATOR, SAVED = "extras", "notes", "saved"
ALONE = f"{NAME}-tallies"
STREAMS = (NAME, ALONE)
POLICY = policy_by_name("marginal-cost", PolicyOptions(d_max=4, size_ratio_max=None))
_NOTE = pa.struct({"n": pa.int64(), "text": pa.string()})
TAGS = pa.list_(pa.struct({"tag": pa.string(), "weight": pa.float64()}))
SAID: list[tuple[bytes, ...]] = []
"""what the operator was told at a reset that it had prepared"""
_KEYS, _BAD = 40, 13


class Notes(Operator):
    """Keeps the newest note of each key, which may be null, and its tags; it prepares how many rows it has seen."""

    key = pa.schema([("name", pa.string())])
    nullable = ("name",)
    inputs = ("n",)
    output = pa.schema([("name", pa.string()), ("n", pa.int64()), ("tags", TAGS)])
    newest = ValueState(value={"note": _NOTE, "tags": TAGS})
    seen = MapState(key={"digit": pa.int64()}, value={"n": pa.int64()}, nullable=("digit",))

    def open(self, context: Any) -> None:
        """Begin to count."""
        self.count = 0

    def process(self, rows: Rows, state: State) -> pa.Table:
        """Note the newest number of each key; refuse the unlucky."""
        n = rows.table.column("n").to_numpy()
        if (n % 100 == _BAD).any():
            raise BadRow("13 is unlucky: take another", rows=n % 100 == _BAD, reason="13 is unlucky")
        self.count += len(rows)
        last = rows.last("n").to_pylist()
        notes = pa.array([{"n": each, "text": None if each % 3 else "x" * (each % 7)} for each in last], _NOTE)
        state.newest.put(rows.keys, {"note": notes, "tags": _tags(last)})
        digits = pa.array([None if each % 2 else each % 10 for each in last], pa.int64())
        state.seen.put(rows.keys.columns.append_column("digit", digits).append_column("n", pa.array(last)))
        return pa.table({"name": rows.table.column("name"), "n": n, "tags": _tags(n.tolist())}, schema=self.output)

    def drain(self, state: State) -> pa.Table:
        """Return nothing more."""
        return self.output.empty_table()

    def prepare_for_nonblocking_checkpoint(self, checkpoint: CheckpointWriter, state: State) -> None:
        """Name the position."""
        checkpoint.write(b"%d:%d" % (checkpoint.id, self.count))

    def reset(self, checkpoint: OperatorCheckpoint, state: State) -> None:
        """Note what was prepared."""
        SAID.append(checkpoint.prepared)


class Tallies(Operator):
    """Counts by key, outside the region."""

    name = "tallies"
    key = pa.schema([("name", pa.string())])
    nullable = ("name",)
    totals = ValueState(value={"rows": pa.int64()})

    def process(self, rows: Rows, state: State) -> None:
        """Count."""
        state.totals.put(rows.keys, {"rows": rows.count(initial=state.totals.get(rows.keys)["rows"])})


STREAM = Stream(
    NAME,
    source=lambda spark, _: spark.sql(""),
    operators=[Notes(name=OPERATOR)],
    sinks={OPERATOR: None},
    on_bad_row="dead-letter",
    autonomous=[Autonomous(Tallies())],
    max_parallelism=4,
)


def _tags(numbers: list[int]) -> pa.Array:
    tags = [None if n % 5 == 0 else [{"tag": f"tag {i}", "weight": n / 4} for i in range(n % 4)] for n in numbers]
    return pa.array(tags, TAGS)


def batch(n: int) -> pa.Table:
    """All keys in the first micro-batch, then a few of them, one of them null; and, in some, a bad row."""
    size = _KEYS if n == 1 else 6
    numbers = [100 * n + i for i in range(size)]
    if n % 2:
        numbers[-1] = 100 * n + _BAD
    keys = [None if (n + i) % 5 == 0 else f"key {(7 * n + i) % _KEYS}" for i in range(size)]
    return pa.table({"name": pa.array(keys, pa.string()), "n": pa.array(numbers, pa.int64())})


class ExtrasRun(RegionRun):
    """One run of the region, which delivers to the tables of its sinks; or, in a store without tables, to `rows`."""

    def __init__(self, place: OpenWarehouse, *, delivers: bool = True, parallelism: int = 2) -> None:
        tables = frozenset({OPERATOR, DEAD_LETTERS} if has_tables(place) else ())
        super().__init__(place, STREAM, POLICY, parallelism, tables=tables)
        self.rows: dict[str, list[dict[str, Any]]] = {OPERATOR: [], DEAD_LETTERS: []}
        if delivers:
            self.deliver()

    def deliver(self) -> None:
        """Hand over what is outstanding."""
        self.region.outbox.deliver(self.region.completed, dict.fromkeys(self.rows, self._give))

    def _give(self, output: Any) -> None:
        store = self.region.warehouse.store
        if has_tables(self.region):
            SinkTable(store, output.stream, output.name).deliver(output)
        else:
            found = [row for each in output.objects for part in read_output(store, each) for row in part.to_pylist()]
            self.rows[output.name] += found


def has_tables(place: Any) -> bool:
    """Whether its sinks are Delta tables."""
    return not place.warehouse.store_url.startswith("rocksdb")


def rows_in(run: ExtrasRun, place: OpenWarehouse, sink: str) -> list[str]:
    """What a reader of a sink sees: the rows, or of dead letters those that were refused; each as text, in order."""
    rows = run.rows[sink]
    if has_tables(place):
        table = SinkTable(place.warehouse.store, NAME, sink).open()
        assert table is not None
        rows = table.to_pyarrow_table().to_pylist()
    if sink == DEAD_LETTERS:
        return sorted(str(json.loads(row["row"])["n"]) for row in rows)
    return sorted(repr([row["name"], row["n"], row["tags"]]) for row in rows)


def delivered(numbers: Iterable[int]) -> dict[str, list[str]]:
    """What the sinks have after these micro-batches, as `rows_in` gives it."""
    rows = [row for n in numbers for row in batch(n).to_pylist()]
    bad = [row["n"] for row in rows if row["n"] % 100 == _BAD]
    good = [row for row in rows if row["n"] % 100 != _BAD]
    tags = _tags([row["n"] for row in good]).to_pylist()
    found = [repr([row["name"], row["n"], of]) for row, of in zip(good, tags, strict=True)]
    return {OPERATOR: sorted(found), DEAD_LETTERS: sorted(map(str, bad))}


def write(place: OpenWarehouse, export: Path) -> None:
    """Run the region and the autonomous operator in an empty warehouse, and export a savepoint."""
    for n in range(1, 6):
        run = ExtrasRun(place, parallelism=1 + n % 2)
        run.step(batch(n))
        run.deliver()
        run.region.close("done")
    [alone] = STREAM.autonomous_streams()
    beside = RegionRun(place, alone, POLICY, parallelism=2, checkpoint_steps=2)
    for n in range(1, 9):
        beside.step(batch(n))
    beside.region.close("done")
    set_savepoint(place.catalog, NAME, SAVED, at="4")
    materialize(place, NAME, OPERATOR, 4, id="golden", parallelism=2, run=in_order)
    if has_tables(place):
        export_savepoint(place, NAME, SAVED, str(export))
    run = ExtrasRun(place)
    run.step_without_rows()
    run.deliver()
    run.step(batch(7))
    run.region.close("stopped before the outputs were delivered")


def opened(archive: Path, directory: Path) -> tuple[str, dict[str, Any]]:
    """Unpack an archive into a directory; return the URL of its warehouse, and what it must give."""
    kind = "rocksdb://" if ".rocksdb." in archive.name else ""
    return f"{kind}{directory / 'warehouse'}", unpack(archive, directory)


def write_archive(path: Path, kind: str) -> None:
    """Write an archive of a warehouse in a store of this kind: "", or "rocksdb://"."""
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        with OpenWarehouse.open_writable(f"{kind}{root / 'warehouse'}") as place:
            write(place, root / "export")
            expected = contents(place, STREAMS)
        for log in root.glob("warehouse/objects/_sinks/*/*/_delta_log/*.json"):
            log.write_text(log.read_text().replace(str(root), "/golden"))
        pack(path, root, expected, ("warehouse", "export"))
