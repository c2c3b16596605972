"""A rollback over the removal of a source, an export and a fork keep what was read of it, and where it begins."""

from dataclasses import replace
from pathlib import Path

import pytest

import siltstone
from siltstone.catalog.records.source_entries import decode_offsets
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.errors import UsageError
from siltstone.settings import Settings
from siltstone.spark.operations import RunRequest, replay, run
from tests.examples import long_form
from tests.spark.latest_source import arrive
from tests.spark.test_named_sources import (
    NAME,
    add,
    alarms,
    counted,
    files_of,
    position,
    roll_back,
    shop,
    short,
)
from tests.spark_runs import at, check_proven

pytestmark = pytest.mark.usefixtures("spark")


def newest(settings: Settings) -> int:
    with OpenWarehouse.open_existing(settings.warehouse) as place:
        return place.catalog.checkpoints.last_id(NAME)


@pytest.mark.parametrize("steps_without", [long_form(1), 2, long_form(3)])
def test_a_rollback_over_a_drop_reads_nothing_twice(tmp_path: Path, steps_without: int) -> None:
    settings, directory = at(tmp_path / "w", checkpoint_steps=1), tmp_path / "in"
    messages = Path(settings.warehouse) / "source" / NAME
    arrive(messages, 0)
    add(directory, "clicks")
    add(directory, "orders", 3)
    every = shop(directory, "clicks", "orders", extra={"alarms": alarms})
    run(settings, every, RunRequest())
    arrive(messages, 5)
    add(directory, "clicks")
    run(settings, every, RunRequest())
    before = newest(settings)
    for n in range(steps_without):
        add(directory, "clicks")
        drop = [] if n else ["source.alarms", "source.orders", "of-alarms", "of-orders"]
        run(settings, shop(directory, "clicks"), RunRequest(drop=drop))
    roll_back(settings, before)
    for batches in range(1, steps_without + 1):  # each run begins at what the one before has followed of the log
        run(settings, every, RunRequest(batches=1))
        assert newest(settings) >= before + batches
    clicks = 2 + steps_without
    counts = {"clicks": clicks, "orders": 3, "alarms": 5}
    assert {name: counted(settings, name) for name in counts} == counts
    arrive(messages, 7)
    for name in ("clicks", "orders"):
        add(directory, name)
    run(settings, every, RunRequest())
    counts = {"clicks": clicks + 1, "orders": 4, "alarms": 7}
    assert {name: counted(settings, name) for name in counts} == counts
    assert replay(settings, every, since=str(before)).proven


def test_a_run_without_the_source_follows_its_own_steps_again(tmp_path: Path) -> None:
    settings, directory = at(tmp_path / "w", checkpoint_steps=1), tmp_path / "in"
    add(directory, "clicks")
    add(directory, "orders", 3)
    run(settings, shop(directory, "clicks", "orders"), RunRequest())
    before, left = newest(settings), shop(directory, "clicks")
    for n in range(3):
        add(directory, "clicks")
        run(settings, left, RunRequest(drop=[] if n else ["source.orders", "of-orders"]))
    told = decode_offsets(position(settings).newest[0].offsets)
    assert told["orders"] == '{"logOffset":2}', "each step tells where the source is that was dropped"
    assert replay(settings, left, since=str(before + 1)).proven
    for to in (before, before + 1):
        roll_back(settings, to)
        drop = ["source.orders", "of-orders"] if to == before else []
        run(settings, left, RunRequest(drop=drop))
        assert counted(settings, "clicks") == 4
    check_proven(settings, NAME)


def test_a_source_without_a_name_is_recorded_with_one_that_was_dropped(tmp_path: Path) -> None:
    settings, directory = at(tmp_path / "w", checkpoint_steps=1), tmp_path / "in"
    add(directory, "source")
    add(directory, "orders", 3)
    both = shop(directory, "orders", "source")
    run(settings, both, RunRequest())
    before = newest(settings)
    for n in range(3):
        add(directory, "source")
        run(settings, short(directory), RunRequest(drop=[] if n else ["source.orders", "of-orders"]))
    assert counted(settings, "source") == 4
    roll_back(settings, before)
    add(directory, "orders")
    for _ in range(3):
        run(settings, both, RunRequest(batches=1))
    run(settings, both, RunRequest())
    assert (counted(settings, "source"), counted(settings, "orders")) == (4, 4)
    assert replay(settings, both, since=str(before)).proven


def test_a_name_that_was_dropped_stays_taken_after_an_import(tmp_path: Path) -> None:
    settings, directory = at(tmp_path / "w"), tmp_path / "in"
    for name in ("clicks", "orders"):
        add(directory, name)
    both = shop(directory, "clicks", "orders")
    run(settings, both, RunRequest())
    add(directory, "clicks")
    run(settings, shop(directory, "clicks"), RunRequest(drop=["source.orders", "of-orders"]))
    add(directory, "clicks")
    run(settings, shop(directory, "clicks"), RunRequest())
    stream = siltstone.open(settings.warehouse).stream(NAME)
    stream.materialize()
    stream.savepoint("kept")
    places = [settings]
    for n in range(2):  # an import of an import knows it, too
        stream.export_savepoint("kept", str(tmp_path / f"export-{n}"))
        places.append(at(tmp_path / f"imported-{n}"))
        client = siltstone.open(places[-1].warehouse)
        client.import_savepoint(str(tmp_path / f"export-{n}"))
        stream = client.stream(NAME)
    for place in places:
        with pytest.raises(UsageError, match=r"source orders of stream shop was given up at checkpoint \d+: give it"):
            run(place, both, RunRequest())
    add(directory, "clicks")
    run(places[-1], shop(directory, "clicks"), RunRequest())
    assert counted(places[-1], "clicks") == 4


@pytest.mark.parametrize("way", ["fork", "import"])
def test_a_source_that_was_added_later_begins_anew_in_a_fork_and_an_import(tmp_path: Path, way: str) -> None:
    settings, directory = at(tmp_path / "w"), tmp_path / "in"
    messages = Path(settings.warehouse) / "source" / NAME
    arrive(messages, 0)
    add(directory, "clicks")
    run(settings, shop(directory, "clicks"), RunRequest())
    both = shop(directory, extra={"clicks": files_of(directory, "clicks"), "alarms": alarms})
    client = siltstone.open(settings.warehouse)
    client.stream(NAME).materialize()
    client.stream(NAME).savepoint("first")
    arrive(messages, 2)
    add(directory, "clicks")
    run(settings, both, RunRequest())
    arrive(messages, 8)
    add(directory, "clicks")
    if way == "fork":
        client.stream(NAME).fork("shop2", at="1")
        run(settings, replace(both, name="shop2", origin=NAME), RunRequest())
        found, name = settings, "shop2"
    else:
        client.stream(NAME).export_savepoint("first", str(tmp_path / "export"))
        found, name = at(tmp_path / "w2"), NAME
        siltstone.open(found.warehouse).import_savepoint(str(tmp_path / "export"))
        arrive(Path(found.warehouse) / "source" / NAME, 8)
        run(found, both, RunRequest())
    with OpenWarehouse.open_existing(found.warehouse) as place:
        read = place.catalog.input_log.get_position(name, place.catalog.checkpoints.last_id(name))
    assert read.beginning is not None and decode_offsets(read.beginning.offsets)["alarms"] == '{"next": 8}'
    assert decode_offsets(read.newest[-1].offsets)["alarms"] == '{"next": 8}', "none is read that came before"
    old = position(settings).beginning
    assert old is not None and decode_offsets(old.offsets)["alarms"] == '{"next": 2}'
