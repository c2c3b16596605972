"""The daily upkeep of the tables of a stream's sinks, from the tick of its schedule to the end of its job: no Spark."""

from dataclasses import replace
from typing import Any

import dagster as dg

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.dagster import stream_definitions
from siltstone.dagster.resources import SparkResource, WarehouseResource
from siltstone.sinks.delta import DeltaSink
from tests.dagster_runs import plain
from tests.delta_run import TableRun, rows_in, sink_table, table_files
from tests.outbox_run import NAME, SINK, STREAM, batch, inputs, outstanding

DEFINITIONS = stream_definitions(replace(STREAM, sinks={SINK: DeltaSink()}))
REPOSITORY = DEFINITIONS.get_repository_def()


class Daemon:
    """What Dagster's daemon does: evaluates the schedule, and runs the job that a tick asks for."""

    def __init__(self, instance: dg.DagsterInstance) -> None:
        self.instance = instance
        (schedule,) = (s for s in DEFINITIONS.schedules or [] if s.name == "siltstone__optimize__schedule")
        assert isinstance(schedule, dg.ScheduleDefinition)
        assert schedule.default_status is dg.DefaultScheduleStatus.RUNNING
        self.schedule = schedule

    def tick(self) -> dict[str, Any] | str:
        """The metadata of the job's output, or why it was not run."""
        resources = {"siltstone_warehouse": WarehouseResource(), "siltstone_spark": SparkResource()}
        with dg.build_schedule_context(
            instance=self.instance, resources=resources, repository_def=REPOSITORY
        ) as context:
            tick = self.schedule.evaluate_tick(context)
        if tick.skip_message:
            return tick.skip_message
        [request] = tick.run_requests or []
        job = DEFINITIONS.resolve_job_def(self.schedule.job_name)
        result = job.execute_in_process(request.run_config, instance=self.instance, tags=dict(request.tags))
        assert result.success
        [output] = [e for e in result.all_events if e.is_successful_output]
        return plain(output.step_output_data.metadata)


def files_in_log(place: OpenWarehouse) -> int:
    table = sink_table(place).open()
    assert table is not None
    return len(table.file_uris())


def test_a_tick_merges_files_and_deletes_none_that_a_delivery_needs(
    place: OpenWarehouse, instance: dg.DagsterInstance
) -> None:
    daemon = Daemon(instance)
    run = TableRun(place)
    assert daemon.tick() == f"{NAME}: no checkpoint yet"
    for n in range(1, 6):
        run.step(batch(n))
    merged, before = table_files(place), files_in_log(place)
    run.delivers = False
    run.step(batch(6))
    waiting = table_files(place) - merged
    assert outstanding(place) and waiting

    done = daemon.tick()
    assert isinstance(done, dict) and done["tables"][0]["merged"] == before
    assert files_in_log(place) < before and rows_in(place) == inputs(range(1, 6))

    table = sink_table(place).open()
    assert table is not None
    table.alter.set_table_properties({"delta.deletedFileRetentionDuration": "interval 0 seconds"})
    run.region.outbox.clean()
    for _ in range(20):  # a file is older than no time at all only in the next millisecond
        if not merged & table_files(place):
            break
        daemon.tick()
    assert not merged & table_files(place), "nobody needs the small files any more"
    assert waiting <= table_files(place), "that delivery is outstanding"
    assert rows_in(place) == inputs(range(1, 6))

    run.deliver()
    assert rows_in(place) == inputs(range(1, 7)) and not outstanding(place)
    daemon.tick()
    assert rows_in(place) == inputs(range(1, 7)) and sink_table(place).find_delivered() == 6


def test_a_tick_is_skipped_if_no_sink_is_a_table(place: OpenWarehouse, instance: dg.DagsterInstance) -> None:
    run = TableRun(place)
    run.delivers = False
    run.region.outbox.tables = frozenset()
    run.step(batch(1))
    assert Daemon(instance).tick() == f"{NAME}: no sink is a table"
