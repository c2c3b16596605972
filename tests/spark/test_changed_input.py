"""Steps that are run again over input that has changed, or by code that makes other rows of it: never in silence."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession

from siltstone.aggregates.operator import Aggregate, Count, Sum
from siltstone.catalog.records.objects import ObjectKind
from siltstone.catalog.records.source_entries import decode_sources, list_files
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.errors import BadRow, InputChanged, LossRefused
from siltstone.operator import Operator, Rows, State, ValueState
from siltstone.run.step_digests import INPUT_CHANGED
from siltstone.settings import Settings
from siltstone.spark.operations import RunRequest, edit, recover, replay, rescale, run, verify
from siltstone.stream import DEAD_LETTERS, Stream
from tests.delta_run import read_sink
from tests.examples import long_form, usually
from tests.spark.json_files import json_source
from tests.spark_runs import at

FILES = 4


def line(k: str, v: int, **more: Any) -> str:
    return json.dumps({"k": k, "v": v, **more})


def write(directory: Path, number: int, *lines: str) -> Path:
    """A file of a batch of its own; they are read in the order of their numbers."""
    directory.mkdir(exist_ok=True)
    path = directory / f"{number}.json"
    path.write_text("".join(f"{each}\n" for each in lines))
    os.utime(path, (1_600_000_000 + number,) * 2)
    return path


def source_of(directory: Path, schema: str = "k string, v long", *columns: str) -> Callable[..., DataFrame]:
    return json_source(directory, schema, *columns)


class Last(Operator):
    """The last value of a key; `OFFSET` is what another version of its code makes of it."""

    name = "last"
    key = pa.schema({"k": pa.string()})
    inputs = ("v",)
    output = pa.schema({"k": pa.string(), "v": pa.int64()})
    latest = ValueState({"v": pa.int64()})
    OFFSET = 0

    def process(self, rows: Rows, state: State) -> pa.Table:
        negative = rows.table["v"].to_numpy() < 0
        if negative.any():
            raise BadRow("negative", rows=negative)
        made = rows.max("v")
        state.latest.put(rows.keys, {"v": made})
        return rows.keys.with_columns({"v": made + self.OFFSET})


class LastOfLater(Last):
    OFFSET = 1


def totals(**options: Any) -> Aggregate:
    return Aggregate("tot", {"k": pa.string()}, [Count("n"), Sum("s", of="v")], **options)


def stream_of(source: Any, operators: Sequence[Operator] | None = None, **options: Any) -> Stream:
    chosen = [totals(), Last()] if operators is None else operators
    sinks = dict.fromkeys([*(each.name for each in chosen), *([DEAD_LETTERS] if options else [])])
    return Stream("g", source, chosen, sinks=sinks, max_parallelism=8, **options)


def four_files(directory: Path) -> None:
    for number in range(FILES):
        write(directory, number, line("a", number), line(f"k{number}", 100 + number))


def damage(settings: Settings, checkpoint: int, kind: ObjectKind = ObjectKind.MANIFEST, stream: str = "g") -> None:
    """Make a checkpoint one that no run can resume from."""
    with OpenWarehouse.open_existing(settings.warehouse) as place:
        for stored in place.catalog.objects.list(stream, [checkpoint]):
            if stored.kind is kind:
                path = place.warehouse.local.objects / stored.name
                path.chmod(0o644)
                path.write_bytes(path.read_bytes()[:-1])


def outcome(settings: Settings) -> str | None:
    with OpenWarehouse.open_existing(settings.warehouse) as place:
        return place.catalog.runs.list("g")[-1].outcome


def sums(settings: Settings, sink: str = "tot") -> list[dict[str, Any]]:
    rows = read_sink(settings.warehouse, "g", sink)
    return sorted(rows.to_pylist(), key=lambda row: [*row.values()])


CHANGES = {
    "more bytes": ([line("a", 1_000_000), line("new", 5), line("other", 6)], "has 69 bytes, and had 41 before"),
    "as many bytes": ([line("a", 7), line("k3", 103)], "operator tot has read 2 rows as before, but other ones"),
    "fewer rows": ([line("a", 3, x="1234567890") + "   "], "operator tot has read 1 rows, and 2 before"),
}


@pytest.mark.parametrize("change", usually(CHANGES, "more bytes", "fewer rows"))
def test_a_file_replaced_under_its_name_stops_a_recovery_by_name(tmp_path: Path, change: str) -> None:
    settings, stream, directory = at(tmp_path / "w"), stream_of(source_of(tmp_path / "in")), tmp_path / "in"
    four_files(directory)
    assert run(settings, stream, RunRequest()).checkpoints == [1, 2, 3, 4]
    before = sums(settings)
    kept = (directory / "3.json").read_text()
    damage(settings, 4)
    lines, said = CHANGES[change]
    write(directory, 3, *lines)
    for _ in range(2):  # again, and again
        with pytest.raises(InputChanged) as failed:
            run(settings, stream, RunRequest())
        assert said in str(failed.value) and "step 4" in str(failed.value) and "3.json" in str(failed.value)
        assert "recover" in failed.value.full_text and "--accept-loss" in failed.value.full_text
        assert sums(settings) == before and outcome(settings) == INPUT_CHANGED

    write(directory, 3, *kept.splitlines())  # bring it back
    write(directory, 4, line("a", 4))
    result = run(settings, stream, RunRequest())
    now = sums(settings)
    assert result.checkpoints == [4, 5] and [row for row in now if row in before] == before and len(now) == 9
    assert verify(settings, "g", every=True).proven and replay(settings, stream).proven


def test_only_a_person_gives_up_logged_steps_and_then_the_new_history_is_whole(tmp_path: Path) -> None:
    settings, stream, directory = at(tmp_path / "w"), stream_of(source_of(tmp_path / "in")), tmp_path / "in"
    four_files(directory)
    run(settings, stream, RunRequest())
    damage(settings, 3)
    damage(settings, 4)
    write(directory, 3, line("a", 7), line("k9", 103))
    with pytest.raises(InputChanged):
        run(settings, stream, RunRequest())
    # Step 3 came again as it was, and so did checkpoint 3.
    with pytest.raises(LossRefused, match=r"logged steps of checkpoint 4 cannot be run again"):
        recover(settings, "g")
    asked = recover(settings, "g", dry_run=True)
    assert asked.logged == (4,) and asked.refusal is not None and "would give up the logged steps" in asked.summary
    done = recover(settings, "g", accept_loss=True)
    assert (done.checkpoint, done.given_up, done.logged) == (3, (), (4,))
    assert not recover(settings, "g", accept_loss=True).logged
    write(directory, 4, line("a", 4))
    assert run(settings, stream, RunRequest()).checkpoints == [4, 5]
    counted = {row["k"]: row["n"] for row in sums(settings)}
    assert counted == {"a": 5, "k0": 1, "k1": 1, "k2": 1, "k3": 1, "k9": 1}  # the sink keeps what it had: k3
    assert [row["s"] for row in sums(settings) if row["k"] == "a"] == [0, 1, 3, 6, 10, 14]  # two of n = 4
    assert verify(settings, "g", every=True).proven and replay(settings, stream).proven


def test_code_that_makes_other_rows_of_the_same_input_is_noticed(tmp_path: Path) -> None:
    settings, directory = at(tmp_path / "w"), tmp_path / "in"
    four_files(directory)
    source = source_of(directory)
    run(settings, stream_of(source, [Last()]), RunRequest())
    damage(settings, 4)
    with pytest.raises(InputChanged, match=r"operator last has made 2 rows as before, but other ones, of the same"):
        run(settings, stream_of(source, [LastOfLater()]), RunRequest())
    with pytest.raises(InputChanged, match=r"g cannot be replayed: step 1 is run again, and operator last has made"):
        replay(settings, stream_of(source, [LastOfLater()]), to="3")
    assert run(settings, stream_of(source, [Last()]), RunRequest()).checkpoints == [4]


@pytest.mark.parametrize("parallelism", [long_form(1), 3])
def test_dead_letters_and_parallelism_come_again_as_they_were(tmp_path: Path, parallelism: int) -> None:
    settings, directory = at(tmp_path / "w"), tmp_path / "in"
    for number in range(FILES):
        write(directory, number, line("a", number), line("b", -number), line("c", 5))
    stream = stream_of(source_of(directory), [Last(), totals()], on_bad_row="dead-letter")
    run(settings, stream, RunRequest())
    letters = sums(settings, "last"), read_sink(settings.warehouse, "g", DEAD_LETTERS).num_rows
    assert letters[1] == 3
    damage(settings, 4)
    assert run(settings.model_copy(update={"parallelism": parallelism}), stream, RunRequest()).checkpoints == [4]
    assert (sums(settings, "last"), read_sink(settings.warehouse, "g", DEAD_LETTERS).num_rows) == letters
    damage(settings, 4)
    write(directory, 3, line("a", 3), line("b", -4), line("c", 5))
    with pytest.raises(InputChanged, match=r"operator last has read 3 rows as before, but other ones"):
        run(settings, stream, RunRequest())


class Dropping(Operator):
    """Combines rows, and may leave none of them."""

    name = "dropping"
    key = pa.schema({"k": pa.string()})
    inputs = ("v",)
    combined = pa.schema([pa.field("k", pa.string(), nullable=False), ("v", pa.int64())])
    latest = ValueState({"v": pa.int64()})

    def combine(self, table: pa.Table) -> pa.Table:
        assert table.column_names == ["k", "v"]
        chosen = table.filter(pa.array(table["v"].to_numpy() >= 100))
        return chosen.group_by("k").aggregate([("v", "max")]).rename_columns(["k", "v"])

    def process(self, rows: Rows, state: State) -> None:
        assert rows.table.column_names == ["k", "v"]
        state.latest.put(rows.keys, {"v": rows.max("v")})


def test_rows_that_are_combined_away_are_compared_too(tmp_path: Path) -> None:
    settings, directory = at(tmp_path / "w"), tmp_path / "in"
    stream = Stream("g", source_of(directory), [Dropping()], max_parallelism=8)
    write(directory, 0, line("a", 1), line("b", 200))
    write(directory, 1, line("a", 2), line("b", 3))
    result = run(settings, stream, RunRequest())
    assert result.checkpoints == [1, 2] and result.rows == 1
    damage(settings, 2)
    write(directory, 1, line("a", 2), line("c", 3))
    with pytest.raises(InputChanged, match=r"operator dropping has read 2 rows as before, but other ones"):
        run(settings, stream, RunRequest())


def test_columns_that_nobody_reads_and_that_were_added_do_not_matter(tmp_path: Path) -> None:
    settings, directory = at(tmp_path / "w"), tmp_path / "in"
    for number in range(FILES):
        write(directory, number, line("a", number, w=number))
    run(settings, stream_of(source_of(directory)), RunRequest())
    damage(settings, 4)
    wider = source_of(directory, "k string, v long, w int", "*", "rand() as noise", "map(k, v) as m")
    assert run(settings, stream_of(wider), RunRequest()).checkpoints == [4]


def test_rows_made_at_random_cannot_be_replayed(tmp_path: Path) -> None:
    settings, directory = at(tmp_path / "w"), tmp_path / "in"
    four_files(directory)
    stream = stream_of(source_of(directory, "k string, v long", "k", "cast(1e9 * rand() as long) as v"), [totals()])
    run(settings, stream, RunRequest())
    with pytest.raises(InputChanged, match=r"step 1 is run again, and operator tot has read 2 rows as before"):
        replay(settings, stream)


def test_files_that_were_moved_are_the_same(tmp_path: Path) -> None:
    settings, directory = at(tmp_path / "w"), tmp_path / "in"
    four_files(directory)
    stream = stream_of(source_of(directory))
    run(settings, stream, RunRequest())
    for file in directory.iterdir():
        os.utime(file)  # as a copy has it
    assert replay(settings, stream).proven
    damage(settings, 4)
    assert run(settings, stream, RunRequest()).checkpoints == [4]


ODD = ["a b", "%20", "ü", "#x?", "c;d,e", "new\nline", "{x}", "a=b", "'\"", "+"]


def test_files_with_any_name_and_tables_that_are_joined_come_again(tmp_path: Path) -> None:
    settings, directory = at(tmp_path / "w"), tmp_path / "in &+ %41"
    directory.mkdir()
    (tmp_path / "names").mkdir()
    (tmp_path / "names" / "0.json").write_text(json.dumps({"k": "a", "name": "x"}))
    for number, name in enumerate(ODD):
        path = directory / f"{name}.json"
        path.write_text(line("a", number) + "\n" * (1 + number))
        os.utime(path, (1_600_000_000 + number,) * 2)

    def source(spark: SparkSession, options: Mapping[str, str]) -> DataFrame:
        reader = spark.readStream.schema("k string, v long").option("maxFilesPerTrigger", 3)
        names = spark.read.schema("k string, name string").json(str(tmp_path / "names"))
        return reader.json(str(directory)).join(names, "k")

    stream = stream_of(source, [totals()])
    run(settings, stream, RunRequest())
    assert replay(settings, stream).proven
    with OpenWarehouse.open_existing(settings.warehouse) as place:
        steps = place.catalog.input_log.list("g", 99)
    entries = [entry for step in steps for entry in decode_sources(step.sources).get("0", {}).values()]
    files = [file for entry in entries for file in list_files(entry)]
    assert sorted(file.size for file in files) == [len(line("a", 0)) + 1 + number for number in range(len(ODD))]
    (directory / f"{ODD[5]}.json").unlink()
    with pytest.raises(InputChanged, match=r"source data of step 2 are missing: .*new%0Aline\.json"):
        replay(settings, stream)


def test_steps_around_an_edit_and_a_rescale_come_again(tmp_path: Path, spark: SparkSession) -> None:
    settings, directory = at(tmp_path / "w"), tmp_path / "in"
    stream = stream_of(source_of(directory))
    for number in range(3):
        write(directory, number, line("a", number), line(f"k{number}", 100 + number))
        run(settings, stream, RunRequest())
        if number == 0:
            edit(settings, stream, "last", "latest", spark.createDataFrame([("z", 1)], "k string, v long"))
            rescale(settings, stream, 3)
    with OpenWarehouse.open_existing(settings.warehouse) as place:
        assert len(place.catalog.definitions.list("g")) == 1  # no run recorded the same columns again
    before = sums(settings)
    for checkpoint in (2, 3, 4, 5):
        damage(settings, checkpoint)
    done = recover(settings, "g", accept_loss=True)
    assert (done.given_up, done.edits, done.logged) == ((2, 3, 4, 5), (2,), ())
    assert run(settings, stream, RunRequest()).checkpoints == [2, 3, 4, 5]
    assert sums(settings) == before and verify(settings, "g", every=True).proven


def test_without_a_lost_edit_later_steps_make_other_rows_and_only_their_input_is_compared(
    tmp_path: Path, spark: SparkSession
) -> None:
    settings, directory = at(tmp_path / "w"), tmp_path / "in"
    stream = stream_of(source_of(directory), [totals()])
    for number in range(2):
        write(directory, number, line("a", number))
        run(settings, stream, RunRequest())
    edit(settings, stream, "tot", "totals", spark.createDataFrame([("a", 100, 1000)], "k string, n long, s long"))
    for number in range(2, 4):
        write(directory, number, line("a", number))
        run(settings, stream, RunRequest())
    for checkpoint in (3, 4, 5):
        damage(settings, checkpoint)
    assert recover(settings, "g", accept_loss=True).edits == (3,)
    assert run(settings, stream, RunRequest(batches=1)).checkpoints == [3, 4]
    write(directory, 3, line("a", 9))
    with pytest.raises(InputChanged, match=r"operator tot has read 1 rows as before, but other ones"):
        run(settings, stream, RunRequest())
    write(directory, 3, line("a", 3))
    assert run(settings, stream, RunRequest()).checkpoints == [5]
    assert verify(settings, "g", every=True).proven


class LastOfAll(Last):
    """Reads all columns there are."""

    inputs = ()


def test_dead_letters_come_again_with_columns_that_were_added(tmp_path: Path) -> None:
    settings, directory = at(tmp_path / "w"), tmp_path / "in"
    for number in range(FILES):
        write(directory, number, line("a", number), line("b", -1 - number))
    run(settings, stream_of(source_of(directory), [LastOfAll()], on_bad_row="dead-letter"), RunRequest())
    damage(settings, 4)
    wider = source_of(directory, "k string, v long", "*", "1 as w")
    assert run(settings, stream_of(wider, [LastOfAll()], on_bad_row="dead-letter"), RunRequest()).checkpoints == [4]
    assert read_sink(settings.warehouse, "g", DEAD_LETTERS).num_rows == FILES
