"""Time beside everything else that happens to a stream: its windows, timers and expiry go on as if nothing had."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pandas
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from siltstone.aggregates.functions import Average, Count, First, Last, Max, Min, Sum
from siltstone.aggregates.operator import Aggregate
from siltstone.aggregates.windows import Session, Sliding
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.materialize import HeldWhole, materialize
from siltstone.chains.policies import policy_by_name
from siltstone.change.export_savepoint import export_savepoint
from siltstone.change.fork import fork
from siltstone.change.import_savepoint import import_savepoint, prove_export
from siltstone.change.rebuild import rebuild_catalog
from siltstone.deduplicate import Deduplicate
from siltstone.format.block import decode_block
from siltstone.format.manifests import read_manifest
from siltstone.model import Form, KeyGroupRange, Kind, StoredObject
from siltstone.operator import SOURCE, TTL, Due, Operator, Rows, State, Timer, ValueState
from siltstone.retention.retention_rules import RetentionOptions
from siltstone.retention.savepoints import set_savepoint
from siltstone.retention.truncate import truncate
from siltstone.state.backends.named import BACKENDS
from siltstone.state.backends.named import backend as backend_by_name
from siltstone.store.paths import LocalLayout, is_row_file
from siltstone.stream import Stream
from siltstone.time.clock_rules import decode_clock
from siltstone.time.event_time import EventTime
from tests.batch_answers import firsts, windows
from tests.examples import usually
from tests.proofs import check_restores, in_order
from tests.timed_run import TimedLife

NAME = "timed"
TIME = pa.timestamp("us", "UTC")
BEGIN = datetime(2026, 3, 1, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
ROWS = pa.schema([("user", pa.int64()), ("at", TIME), ("v", pa.int64()), ("id", pa.int64()), ("n", pa.int64())])
FUNCTIONS = (
    Count("n"), Count("n_v", of="v"), Sum("total", of="v"), Min("least", of="v"), Max("most", of="v"),
    Average("mean", of="v"), First("first", of="v", by="at"), Last("last", of="v", by="at"),
)  # fmt: skip
WINDOWS: dict[str, Any] = {
    "sliding": Sliding("40 minutes", "20 minutes", on="at"),
    "session": Session("9 minutes", on="at"),
}
LIVES = 64 * MINUTE
FILES = policy_by_name("files")
BATCHES = 8


class Reminders(Operator):
    """Says each row again half an hour later, and remembers for an hour which there were."""

    name = "reminders"
    key = {"n": pa.int64()}  # noqa: RUF012
    inputs = ("at",)
    output = pa.schema([("n", pa.int64()), ("at", TIME), ("known", pa.bool_())])
    again = Timer()
    seen = ValueState({"at": TIME}, ttl=TTL(LIVES))

    def process(self, rows: Rows, state: State) -> None:
        at = rows.max("at")
        state.again.set(rows.keys, pc.add(at, pa.scalar(30 * MINUTE)))
        state.seen.put(rows.keys, {"at": at})

    def on_timer(self, due: Due, state: State) -> pa.Table:
        return due.keys.with_columns({"at": due.at, "known": state.seen.contains(due.keys)})


def make_stream() -> Stream:
    """A stream with a window, sessions, a deduplication, a timer and a TTL."""
    key = {"user": pa.int64()}
    operators = [Aggregate(name, key, FUNCTIONS, window=window) for name, window in WINDOWS.items()]
    once = Deduplicate("once", {"id": pa.int64()}, within="30 minutes", on="at", columns={"n": pa.int64()})
    return Stream(
        NAME,
        None,
        [*operators, once, Reminders()],
        event_time=EventTime("at", delay="5 minutes", max_ahead=timedelta(days=36500)),
        sinks=dict.fromkeys([*WINDOWS, "once", "reminders"]),
        max_parallelism=4,
    )


def batch(number: int) -> pa.Table:
    """A micro-batch: five rows of three users, within ten minutes and the delay."""
    rows = [
        {
            "user": (number * 2 + place) % 3,
            "at": BEGIN + (10 * number + (7 * place) % 11 - 2) * MINUTE,
            "v": None if place == 3 else number - place,
            "id": place % 3 + 10 * (number // 2),
            "n": 5 * number + place,
        }
        for place in range(5)
    ]
    return pa.Table.from_pylist(rows, ROWS)


def check_answers(life: TimedLife) -> None:
    """The sinks have what a batch query makes of all rows, and nothing that is timed is left."""
    frame = pa.concat_tables(life.given).to_pandas(types_mapper={pa.int64(): pandas.Int64Dtype()}.get)
    frame["before"] = frame["until"] = pandas.Series(dtype="datetime64[us, UTC]")
    frame["step"] = frame["n"] // 5
    for name, window in WINDOWS.items():
        made = life.delivered(name)
        found = {(r["user"], r["window_start"], r["window_end"]): tuple(r[f.name] for f in FUNCTIONS) for r in made}
        assert len(found) == len(made) and found == windows(frame, window), name
        assert not life.rows(name, "totals").num_rows
    once = firsts(frame, ["id"], ["step", "at", "n"])
    assert sorted(row["n"] for row in life.delivered("once")) == sorted(once["n"])
    said = sorted((row["n"], row["at"], row["known"]) for row in life.delivered("reminders"))
    assert said == sorted(
        (n, at.to_pydatetime() + 30 * MINUTE, True) for n, at in zip(frame["n"], frame["at"], strict=True)
    )
    for operator, variable in (("once", "seen"), ("reminders", "again"), ("reminders", "seen")):
        assert not life.rows(operator, variable).num_rows, "nothing timed is left"


def completed_watermark(life: TimedLife) -> int:
    """The watermark of the newest completed checkpoint."""
    checkpoint = life.place.catalog.checkpoints.last_id(life.stream.name)
    clock = decode_clock(life.place.catalog.input_log.get_clock(life.stream.name, checkpoint))
    assert clock is not None
    return clock.sources[SOURCE].watermark or 0


def materialize_all(life: TimedLife, id: str = "m") -> int:
    """Stop, and materialize each operator at the newest checkpoint; return it."""
    life.stop()
    checkpoint = life.place.catalog.checkpoints.last_id(life.stream.name)
    for number, operator in enumerate(life.stream.operators):
        with suppress(HeldWhole):
            materialize(
                life.place, life.stream.name, operator.name, checkpoint, id=f"{id}{number}", parallelism=2, run=in_order
            )
    return checkpoint


# What happens in the middle


def go_elsewhere(life: TimedLife, tmp_path: Path) -> None:
    """A savepoint is exported, and imported into another warehouse under another name."""
    set_savepoint(life.place.catalog, NAME, "moves", at=str(materialize_all(life)))
    export_savepoint(life.place, NAME, "moves", str(tmp_path / "export"))
    other = OpenWarehouse.open_writable(str(tmp_path / "other"))
    import_savepoint(other, prove_export(str(tmp_path / "export")), "moved")
    life.move(other, replace(life.stream, name="moved"))


def rebuild(life: TimedLife, tmp_path: Path) -> None:
    """The catalog is lost, and rebuilt from the store."""
    life.stop()
    url = f"sqlite:///{tmp_path / 'rebuilt.db'}"
    rebuild_catalog(life.place.warehouse, url)
    life.place.catalog.close()
    life.move(OpenWarehouse.open_writable(str(tmp_path / "w"), url), life.stream)


def make_fork(life: TimedLife, tmp_path: Path) -> None:
    """A fork goes on."""
    life.stop()
    fork(life.place, NAME, "branch")
    life.move(life.place, life.stream.as_fork("branch", NAME))


def roll_back(life: TimedLife, tmp_path: Path) -> None:
    """Three checkpoints are given up and come again, while the driver's clock is years ahead, with some pending."""
    life.checkpoint()
    life.roll_back(life.run.region.completed - 3, elsewhere_us=2 * life.now_us)


def change_backends(life: TimedLife, tmp_path: Path) -> None:
    """Each kind of backend takes over what the other left; a crash takes its last steps with it."""
    for backend in ("rocksdb", "heap"):
        life.restart(backend=backend)
        life.step(batch(len(life.given)))
        life.crash(backend="heap" if backend == "rocksdb" else "rocksdb")


def rescale(life: TimedLife, tmp_path: Path) -> None:
    """Two parallelisms, with lost state."""
    for parallelism in (4, 1):
        life.restart(parallelism=parallelism, lost=parallelism == 1)
        life.step(batch(len(life.given)))


def lose_state(life: TimedLife, tmp_path: Path) -> None:
    """Crash with steps in no checkpoint, and checkpoints that are pending."""
    life.crash(lost=True)


def adopt_files(life: TimedLife, tmp_path: Path) -> None:
    """Checkpoints are files of RocksDB: this host takes them up, then another one, then a heap reads them by row."""
    life.stop()
    life.policy = FILES
    life.begin(backend="rocksdb")
    life.step(batch(len(life.given)))
    life.crash(lost=True)
    life.step(batch(len(life.given)))
    life.stop()
    host = replace(life.place.warehouse, local=LocalLayout(tmp_path / "another host"))
    life.move(replace(life.place, warehouse=host), life.stream)
    life.step(batch(len(life.given)))
    assert any(is_row_file(o.name) for o in life.place.catalog.objects.list(NAME))
    life.stop()
    life.policy = policy_by_name("marginal-cost")
    life.crash(lost=True, backend="heap")


MIDDLE: dict[str, tuple[Callable[[TimedLife, Path], None], dict[str, Any]]] = {
    "export": (go_elsewhere, {}),
    "rebuilt catalog": (rebuild, {"every": 2}),
    "fork": (make_fork, {"backend": "rocksdb"}),
    "rollback": (roll_back, {"pending": 2}),
    "backends": (change_backends, {"every": 2}),
    "rescale": (rescale, {"pending": 1}),
    "crash": (lose_state, {"every": 2, "pending": 1, "backend": "rocksdb"}),
    "files": (adopt_files, {"parallelism": 1}),
}


@pytest.mark.parametrize("name", usually(MIDDLE, "export", "rebuilt catalog", "fork", "rollback", "crash"))
def test_time_goes_on(tmp_path: Path, name: str) -> None:
    change, options = MIDDLE[name]
    with OpenWarehouse.open_writable(str(tmp_path / "w")) as place:
        life = TimedLife(place, make_stream(), BEGIN, **options)
        for number in range(BATCHES // 2):
            life.step(batch(number))
        life.advance()
        before = completed_watermark(life)
        change(life, tmp_path)
        assert life.source_clock is not None and (life.source_clock.watermark or 0) >= before > 0, "it never goes back"
        while len(life.given) < BATCHES:
            life.step(batch(len(life.given)))
        life.finish()
        life.run.region.close("completed")
        check_answers(life)
        check_restores(life.place, life.stream.name)
        if life.place is not place:
            life.place.catalog.close()


# What has expired


def keys_in_store(place: OpenWarehouse) -> set[int]:
    """The keys of all rows, and of all deletes, in the objects of the stream."""
    store, objects, found, read = place.warehouse.store, place.catalog.objects.list(NAME), set[int](), set[str]()
    there = {each.name for each in objects}
    for each in (each for each in objects if each.name.endswith(".arrow")):
        read.add(each.name)
        manifest = read_manifest(store, StoredObject(each.name, each.bytes, each.checksum), NAME)
        for handle in (each for each in manifest.handles if each.object in there):
            read.add(handle.object)
            data = store.read_range(handle.object, handle.offset, handle.length)
            if handle.kind is Kind.INCREMENTAL:
                rows = decode_block(data)[0] if handle.form is Form.DELTA else pq.read_table(pa.BufferReader(data))
                found.update(rows["n"].to_pylist())
    assert read == there, "every object was read"
    return found


def keys_in_memory(life: TimedLife) -> set[int]:
    """The keys of the working state."""
    region, found = life.run.region, set[int]()
    [operator], every = life.stream.operators, KeyGroupRange(0, life.stream.max_parallelism)
    for subtask, own in enumerate(every.split(life.options["parallelism"])):
        directory = region.warehouse.local.state(NAME, region.epoch, operator.name, subtask)
        state = backend_by_name(life.options["backend"]).open(directory, operator.tables(), (), own, every.end)
        try:
            found.update(
                n for table in state.tables.values() for rows, _ in table.scan(own) for n in rows["n"].to_pylist()
            )
        finally:
            state.close()
    return found


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_has_expired_is_gone_from_store_and_memory(tmp_path: Path, backend: str) -> None:
    stream = replace(make_stream(), operators=[Reminders()], sinks={"reminders": None})
    with OpenWarehouse.open_writable(str(tmp_path)) as place:
        life = TimedLife(place, stream, BEGIN, backend=backend)
        for number in range(10):
            life.step(batch(number))
        live, expired = set(range(15, 50)), set(range(15))
        assert set(life.rows("reminders", "seen")["n"].to_pylist()) == live == keys_in_memory(life)
        materialize_all(life)
        life.begin()
        life.step(batch(10))  # until then, a run that is open may read what was replaced
        life.stop()
        truncate(place, NAME, RetentionOptions(keep_last=1))
        kept = keys_in_store(place)
        assert not kept & expired and kept >= live
        check_restores(place, NAME)
