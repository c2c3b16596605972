"""Sensors and schedules, each looked at once: no daemon, no Spark."""

import itertools
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import islice
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from siltstone.catalog.records.checkpoints import Checkpoints
from siltstone.catalog.repository import Catalog
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.policies import PolicyOptions, policy_by_name
from siltstone.changelog.upload_options import UploadOptions
from siltstone.dagster import stream_definitions
from siltstone.dagster.names import run_tags
from siltstone.dagster.partitions import hours_of
from siltstone.dagster.resources import SparkResource, WarehouseResource, WebhookNotifier
from siltstone.dagster.resources.notifier import Alert, LogNotifier, Notifier
from siltstone.model import StoredObject
from siltstone.run.region import ConsistentRegion, RegionOptions
from siltstone.store.paths import CheckpointPath
from siltstone.stream import Stream
from tests.dagster_runs import plain
from tests.fault.small_stream import SMALL, purchases
from tests.next_revision import plant_next_revision
from tests.region_run import RegionSteps

POLICY = policy_by_name("adjust-d", PolicyOptions(d0=50, size_ratio_max=None, space_amplification_max=None))
DEFINITIONS = stream_definitions(SMALL)
REPOSITORY = DEFINITIONS.get_repository_def()
PARTS = {f"{operator}_base_checkpoint" for operator in ("accounts", "daily", "places")}


def run(place: OpenWarehouse, who: str, steps: int, stream: Stream = SMALL) -> RegionSteps:
    """Take the stream over and make so many checkpoints; the run stays open."""
    options = RegionOptions(parallelism=1, checkpoint_steps=1, upload=UploadOptions())
    steps_of = RegionSteps(ConsistentRegion.open(stream, place.warehouse, place.catalog, POLICY, options, who))
    done = place.catalog.checkpoints.last_id(stream.name)
    for rows in islice(purchases(), done, done + steps):
        steps_of.step(rows)
    return steps_of


def resources(url: str, **more: Any) -> dict[str, Any]:
    ours = {"warehouse": WarehouseResource(url=url), "spark": SparkResource(), **more}
    return {f"siltstone_{name}": resource for name, resource in ours.items()}


def sensor(name: str) -> dg.SensorDefinition:
    (found,) = (each for each in DEFINITIONS.sensors or [] if each.name == f"siltstone__{name}")
    assert isinstance(found, dg.SensorDefinition)
    return found


def look(name: str, instance: dg.DagsterInstance, cursor: str | None, url: str, **more: Any) -> Any:
    """One tick of a sensor."""
    context = dg.build_sensor_context(
        instance=instance, cursor=cursor, resources=resources(url, **more), repository_def=REPOSITORY
    )
    with context:
        return sensor(name).evaluate_tick(context)


def told(tick: Any) -> list[tuple[str, int]]:
    """The assets of a tick's events, without the stream's name, and their checkpoints."""
    return [("/".join(e.asset_key.path[1:]), plain(e.metadata)["checkpoint"]) for e in tick.asset_events]


def test_checkpoints_of_runs_outside_dagster_become_events_once(
    place: OpenWarehouse, url: str, instance: dg.DagsterInstance
) -> None:
    run(place, "somebody", 2)
    first = look("new_checkpoints", instance, None, url)
    deltas = {(asset.replace("base_checkpoint", "delta_chain"), 2) for asset in PARTS}
    assert set(told(first)) == {*((asset, 1) for asset in PARTS), *deltas, ("checkpoints", 1), ("checkpoints", 2)}
    assert len(first.asset_events) == 8
    (one, two) = (e for e in first.asset_events if e.asset_key.path[-1] == "checkpoints")
    records = place.catalog.checkpoints.list(SMALL.name)
    assert [e.tags["dagster/data_version"] for e in (one, two)] == [r.digest for r in records]
    assert "chain_picture" not in one.metadata and "chain_picture" in two.metadata, "drawn once a look"
    part = next(e for e in first.asset_events if e.asset_key.path[1:] == ["accounts_delta_chain"])
    assert plain(part.metadata).items() >= {"form": "delta", "chain": "1-2", "rows_in": 300}.items()

    again = look("new_checkpoints", instance, first.cursor, url)
    assert (again.asset_events, again.dynamic_partitions_requests) == ([], [])
    assert again.cursor == first.cursor
    assert json.loads(first.cursor)["checkpoints"][SMALL.name][:2] == [2, 1]

    run(place, "Dagster run 0815", 1)
    run(place, "somebody", 1)
    third = look("new_checkpoints", instance, again.cursor, url)
    assert {checkpoint for _, checkpoint in told(third)} == {4}, "a run of Dagster's tells of its own"
    assert json.loads(third.cursor)["checkpoints"][SMALL.name][:2] == [4, 3]


def test_an_hour_becomes_a_partition_when_it_is_over(
    place: OpenWarehouse, url: str, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(place, "somebody", 1)
    (record,) = place.catalog.checkpoints.list(SMALL.name)
    ends = record.committed_at.replace(minute=0, second=0, microsecond=0) + timedelta(hours=1)
    monkeypatch.setattr(Catalog, "now", lambda self: ends - timedelta(microseconds=1))
    first = look("new_checkpoints", instance, None, url)
    assert first.asset_events and not first.dynamic_partitions_requests
    monkeypatch.setattr(Catalog, "now", lambda self: ends)
    second = look("new_checkpoints", instance, first.cursor, url)
    (request,) = second.dynamic_partitions_requests
    assert (request.partitions_def_name, request.partition_keys) == ("small__hours", hours_of([record.committed_at]))
    third = look("new_checkpoints", instance, second.cursor, url)
    assert (third.asset_events, third.dynamic_partitions_requests) == ([], [])


def test_of_a_stream_that_is_far_behind_the_newest_are_told_and_all_hours(
    place: OpenWarehouse, url: str, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("siltstone.dagster.sensors.observation.SHOWN", 2)
    run(place, "somebody", 3)
    times = [record.committed_at for record in place.catalog.checkpoints.list(SMALL.name)]
    moved = [times[0] - timedelta(hours=5), *times[1:]]
    monkeypatch.setattr(Checkpoints, "list_times_after", lambda self, stream, id, epoch: moved[id:])
    monkeypatch.setattr(Catalog, "now", lambda self: times[-1] + timedelta(hours=1))
    first = look("new_checkpoints", instance, None, url)
    assert {checkpoint for _, checkpoint in told(first)} == {2, 3}
    (request,) = first.dynamic_partitions_requests
    assert request.partition_keys == hours_of(moved)
    run(place, "somebody", 1)
    second = look("new_checkpoints", instance, first.cursor, url)
    assert {checkpoint for _, checkpoint in told(second)} == {4}


def test_streams_take_turns(place: OpenWarehouse, url: str, instance: dg.DagsterInstance) -> None:
    """A tick reports a limited number of checkpoints; the next one begins with the streams that were left out."""
    names = ["a", "b", "c"]
    streams = [replace(SMALL, name=name) for name in names]
    for stream in streams:
        run(place, "somebody", 1, stream)
    repository = dg.Definitions.merge(*map(stream_definitions, streams)).get_repository_def()
    seen, told_of = None, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("siltstone.dagster.sensors.observation.AT_ONCE", 1)
        for _ in range(4):
            context = dg.build_sensor_context(
                instance=instance, cursor=seen, resources=resources(url), repository_def=repository
            )
            with context:
                tick = sensor("new_checkpoints").evaluate_tick(context)
            seen = tick.cursor
            told_of.append({event.asset_key.path[0] for event in tick.asset_events})
            if len(told_of) == 2:
                run(place, "somebody", 1, streams[0])
    assert told_of == [{"a"}, {"b"}, {"c"}, {"a"}], "none waits for those that are always ahead"


def test_one_chain_is_drawn_a_look_and_each_in_its_turn(
    place: OpenWarehouse, url: str, instance: dg.DagsterInstance
) -> None:
    streams = [replace(SMALL, name=name) for name in ("a", "b")]
    repository = dg.Definitions.merge(*map(stream_definitions, streams)).get_repository_def()
    seen, drawn = None, []
    for _ in range(3):
        for stream in streams:
            run(place, "somebody", 1, stream)
        context = dg.build_sensor_context(
            instance=instance, cursor=seen, resources=resources(url), repository_def=repository
        )
        with context:
            tick = sensor("new_checkpoints").evaluate_tick(context)
        seen = tick.cursor
        found = [event for event in tick.asset_events if event.asset_key.path[-1] == "checkpoints"]
        assert [event.asset_key.path[0] for event in found] == ["a", "b"]
        assert all("chain" in event.metadata for event in found)
        drawn += [event.asset_key.path[0] for event in found if "chain_picture" in event.metadata]
    assert drawn == ["a", "b", "a"]


def test_ids_that_come_again_after_a_rollback_are_told_again(
    place: OpenWarehouse, url: str, instance: dg.DagsterInstance
) -> None:
    run(place, "somebody", 3)
    first = look("new_checkpoints", instance, None, url)
    epoch = place.catalog.runs.begin(SMALL.name, "a test")
    place.catalog.rollbacks.roll_back(SMALL.name, epoch, 1, "a test", "a test")
    second = look("new_checkpoints", instance, first.cursor, url)
    assert told(second) == []
    run(place, "somebody", 1)
    third = look("new_checkpoints", instance, second.cursor, url)
    assert {checkpoint for _, checkpoint in told(third)} == {2}
    epoch = place.catalog.runs.begin(SMALL.name, "a test")
    place.catalog.rollbacks.roll_back(SMALL.name, epoch, 1, "a test", "a test")
    run(place, "somebody", 1)
    again = look("new_checkpoints", instance, third.cursor, url)
    assert {checkpoint for _, checkpoint in told(again)} == {2}, "though nobody looked in between"
    assert told(look("new_checkpoints", instance, again.cursor, url)) == []
    epoch = place.catalog.runs.begin(SMALL.name, "a test")
    place.catalog.rollbacks.roll_back(SMALL.name, epoch, 1, "a test", "a test")
    back = look("new_checkpoints", instance, again.cursor, url)
    assert told(back) == [], "of an epoch that was told of long ago"
    cursor = json.loads(back.cursor)
    cursor["checkpoints"][SMALL.name] = [7, 9, "in another catalog"]
    assert {checkpoint for _, checkpoint in told(look("new_checkpoints", instance, json.dumps(cursor), url))} == {1}


def test_a_damaged_checkpoint_holds_up_no_other(place: OpenWarehouse, url: str, instance: dg.DagsterInstance) -> None:
    run(place, "somebody", 2)
    place.warehouse.store.delete([place.catalog.checkpoints.get(SMALL.name, 1).manifest.name])
    tick = look("new_checkpoints", instance, None, url)
    assert {checkpoint for _, checkpoint in told(tick)} == {2}
    assert json.loads(tick.cursor)["checkpoints"][SMALL.name][:2] == [2, 1]


def test_every_stream_that_is_due_has_a_run(place: OpenWarehouse, url: str, instance: dg.DagsterInstance) -> None:
    streams = [replace(SMALL, name=name) for name in ("a", "b-x", "c")]
    for stream in streams[:2]:
        run(place, "somebody", 1, stream)
    repository = dg.Definitions.merge(*map(stream_definitions, streams)).get_repository_def()
    assert isinstance(repository, dg.RepositoryDefinition)
    for operation in ("sweep", "verify", "snapshot", "truncate"):
        with dg.build_schedule_context(
            instance=instance, resources=resources(url), repository_def=repository
        ) as context:
            tick = repository.get_schedule_def(f"siltstone__{operation}__schedule").evaluate_tick(context)
        requests = {request.run_key: request for request in tick.run_requests or ()}
        assert {key: request.tags["siltstone/stream"] for key, request in requests.items()} == {"a": "a", "b-x": "b-x"}


@pytest.mark.parametrize("name", ["new_checkpoints", "alerts"])
def test_a_warehouse_or_catalog_that_is_away_is_a_reason_to_wait(
    name: str, url: str, tmp_path: Path, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = {"notifier": LogNotifier()} if name == "alerts" else {}
    before = '{"checkpoints": {"small": [2, 1, "then"]}}' if name == "new_checkpoints" else '["a"]'
    tick = look(name, instance, before, url, **more)
    assert f"no warehouse at {url}" in tick.skip_message
    assert tick.cursor in (None, before), "what was told stays told"
    OpenWarehouse.open_writable(url).__exit__(None, None, None)
    with monkeypatch.context() as patch:
        plant_next_revision(patch, tmp_path)
        tick = look(name, instance, None, url, **more)
    assert "older Siltstone (catalog revision" in tick.skip_message and "`siltstone upgrade`" in tick.skip_message
    monkeypatch.setenv("SILTSTONE_CATALOG", "postgresql://nobody:secret@127.0.0.1:1/nothing?connect_timeout=1")
    tick = look(name, instance, None, url, **more)
    assert "127.0.0.1" in tick.skip_message and "secret" not in tick.skip_message


class Chat:
    """A real server that takes alerts, or refuses so many."""

    def __init__(self) -> None:
        self.refuses = 0
        self.got: list[dict[str, Any]] = []
        chat = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                refused, chat.refuses = chat.refuses > 0, max(0, chat.refuses - 1)
                if not refused:
                    chat.got.append(body)
                self.send_response(503 if refused else 200)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                """Nothing."""

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/hook"
        self.notifier = WebhookNotifier()
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def chat(monkeypatch: pytest.MonkeyPatch) -> Iterator[Chat]:
    opened = Chat()
    monkeypatch.setenv("SILTSTONE_ALERTS__WEBHOOK", opened.url)
    yield opened
    opened.close()


def test_a_failed_proof_is_told_once_for_as_long_as_it_lasts(
    place: OpenWarehouse, url: str, instance: dg.DagsterInstance, chat: Chat
) -> None:
    run(place, "somebody", 2)
    fine = look("alerts", instance, None, url, notifier=chat.notifier)
    assert chat.got == [] and "0 alerts" in fine.skip_message
    place.catalog.checkpoints.record_proof(SMALL.name, 2, False, "object x is damaged")
    first = look("alerts", instance, fine.cursor, url, notifier=chat.notifier)
    (alert,) = chat.got
    assert alert["text"] == "Siltstone, stream small: checkpoint 2 is not proven: object x is damaged"
    assert (alert["stream"], alert["kind"]) == ("small", "proof")
    second = look("alerts", instance, first.cursor, url, notifier=chat.notifier)
    assert len(chat.got) == 1
    place.catalog.checkpoints.record_proof(SMALL.name, 2, True, None)
    third = look("alerts", instance, second.cursor, url, notifier=chat.notifier)
    place.catalog.checkpoints.record_proof(SMALL.name, 2, False, "object x is damaged")
    look("alerts", instance, third.cursor, url, notifier=chat.notifier)
    assert len(chat.got) == 2, "it was mended, and came again"


def test_what_could_not_be_told_is_told_again(
    place: OpenWarehouse, url: str, instance: dg.DagsterInstance, chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tenacity.nap.time.sleep", lambda _: None)
    run(place, "somebody", 1)
    for n in range(3):
        place.catalog.materializations.begin(SMALL.name, "daily", 1, id=f"m{n}", who="a test")
        place.catalog.materializations.fail(SMALL.name, f"m{n}", "the disk is full")
    chat.refuses = 3  # as often as one alert is tried
    first = look("alerts", instance, None, url, notifier=chat.notifier)
    assert chat.got == [] and "0 sent now" in first.skip_message
    chat.refuses = 2
    look("alerts", instance, first.cursor, url, notifier=chat.notifier)
    (alert,) = chat.got
    assert alert["kind"] == "materialization" and "daily is failing" in alert["text"]
    assert "the disk is full" in alert["text"]


def test_a_tick_sends_for_some_seconds_only_and_the_next_goes_on(
    place: OpenWarehouse, url: str, instance: dg.DagsterInstance, chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(place, "somebody", 2)
    for id in (1, 2):
        place.catalog.checkpoints.record_proof(SMALL.name, id, False, "damaged")
    clock = itertools.count(0, 15)
    with monkeypatch.context() as patch:
        patch.setattr("siltstone.dagster.sensors.alerts.time.monotonic", lambda: next(clock))
        first = look("alerts", instance, None, url, notifier=chat.notifier)
    assert len(chat.got) == 1 and "1 sent now" in first.skip_message
    look("alerts", instance, first.cursor, url, notifier=chat.notifier)
    assert [alert["since"] for alert in chat.got] == ["checkpoint 1", "checkpoint 2"]


def test_what_was_told_stays_told_while_its_stream_is_away(
    place: OpenWarehouse, url: str, instance: dg.DagsterInstance, chat: Chat
) -> None:
    run(place, "somebody", 1)
    place.catalog.checkpoints.record_proof(SMALL.name, 1, False, "damaged")
    first = look("alerts", instance, None, url, notifier=chat.notifier)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("siltstone.dagster.sensors.alerts.streams_of", lambda _: {})
        away = look("alerts", instance, first.cursor, url, notifier=chat.notifier)
    look("alerts", instance, away.cursor, url, notifier=chat.notifier)
    assert len(chat.got) == 1


def test_a_stream_that_stands_still_is_told(
    place: OpenWarehouse, url: str, instance: dg.DagsterInstance, chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = run(place, "somebody", 1)
    assert "0 alerts" in look("alerts", instance, None, url, notifier=chat.notifier).skip_message
    monkeypatch.setenv("SILTSTONE_ALERTS__STILL_S", "0.001")
    first = look("alerts", instance, None, url, notifier=chat.notifier)
    look("alerts", instance, first.cursor, url, notifier=chat.notifier)
    (alert,) = chat.got
    assert alert["kind"] == "stream" and "though somebody runs it" in alert["text"]
    place.catalog.runs.end(SMALL.name, opened.region.epoch, "completed")
    look("alerts", instance, None, url, notifier=chat.notifier)
    assert len(chat.got) == 1, "a stream at rest stands still, and that is fine"


def test_a_notifier_of_ones_own_can_be_plugged_in(place: OpenWarehouse, url: str, instance: dg.DagsterInstance) -> None:
    heard: list[Alert] = []

    class Ear(Notifier):
        def notify(self, alert: Alert) -> None:
            heard.append(alert)

    run(place, "somebody", 1)
    place.catalog.checkpoints.record_proof(SMALL.name, 1, False, "damaged")
    look("alerts", instance, None, url, notifier=Ear())
    assert [alert.kind for alert in heard] == ["proof"]


def tick(operation: str, instance: dg.DagsterInstance, url: str) -> Any:
    """One tick of a schedule."""
    (found,) = (s for s in DEFINITIONS.schedules or [] if s.name == f"siltstone__{operation}__schedule")
    assert isinstance(found, dg.ScheduleDefinition)
    with dg.build_schedule_context(instance=instance, resources=resources(url), repository_def=REPOSITORY) as context:
        return found.evaluate_tick(context)


def test_a_tick_waits_for_the_run_of_an_earlier_one(
    place: OpenWarehouse, url: str, instance: dg.DagsterInstance
) -> None:
    run(place, "somebody", 1)
    (request,) = tick("sweep", instance, url).run_requests
    assert request.tags.items() >= run_tags(SMALL.name, "sweep").items()
    going = instance.add_run(
        dg.DagsterRun(
            job_name="siltstone__sweep", status=dg.DagsterRunStatus.STARTED, tags=run_tags(SMALL.name, "sweep")
        )
    )
    waits = tick("sweep", instance, url)
    assert not waits.run_requests and going.run_id in waits.skip_message
    assert tick("truncate", instance, url).run_requests, "other operations do not wait"
    instance.report_run_canceled(going)
    assert tick("sweep", instance, url).run_requests


def work_prefix(place: OpenWarehouse) -> str:
    newest = place.catalog.checkpoints.get_latest(SMALL.name)
    return CheckpointPath(SMALL.name, newest.epoch, newest.id).prefix


def test_a_tick_is_skipped_where_there_is_nothing_to_do(
    url: str, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert f"no warehouse at {url}" in tick("verify", instance, url).skip_message
    with OpenWarehouse.open_writable(url) as place:
        assert "no checkpoint yet" in tick("verify", instance, url).skip_message
        run(place, "somebody", 2)
        assert tick("verify", instance, url).run_requests
        (request,) = tick("snapshot", instance, url).run_requests
        assert request.run_config == {"ops": {"small__full_snapshot": {"config": {"if_possible": True}}}}
        work = place.warehouse.local.work(SMALL.name, place.catalog.checkpoints.get_latest(SMALL.name).epoch)
        work.rename(work.with_name("elsewhere"))
        assert "not on this machine" in tick("snapshot", instance, url).skip_message
        work.with_name("elsewhere").rename(work)
        assert "materialize its full_snapshot" in tick("verify_deep", instance, url).skip_message
        assert tick("materialize", instance, url).skip_message == "small: no chain is due"
        monkeypatch.setenv("SILTSTONE_MATERIALIZATION__CHAIN_BYTES", "1")
        (request,) = tick("materialize", instance, url).run_requests
        assert request.run_config == {"ops": {"small__materialization": {"config": {"due": True}}}}
        taken = StoredObject(f"{work_prefix(place)}accounts.a.snapshot.parquet", 1, "xxh3-128:" + "0" * 32)
        place.catalog.reference_copies.add(SMALL.name, 1, place.catalog.checkpoints.last_id(SMALL.name), [taken], 1)
        assert "has a full snapshot already" in tick("snapshot", instance, url).skip_message
        assert tick("verify_deep", instance, url).run_requests
    monkeypatch.setenv("SILTSTONE_CATALOG", "postgresql://nobody@127.0.0.1:1/nothing?connect_timeout=1")
    assert tick("verify", instance, url).run_requests, "the run says what is wrong"
