"""Which stream and operation a run of Dagster is of, whoever launched it, and which runs there are."""

from collections.abc import Iterator, Mapping
from typing import Any

import dagster as dg

from siltstone.dagster.names import CHECKPOINTS, OF_OPERATORS, OPERATION_TAG, STREAM_TAG, Keys, asset_of

RUN = "run"
AT_WORK = (dg.DagsterRunStatus.STARTING, dg.DagsterRunStatus.STARTED, dg.DagsterRunStatus.CANCELING)
UNFINISHED = (dg.DagsterRunStatus.NOT_STARTED, dg.DagsterRunStatus.QUEUED, *AT_WORK)
ASSET_JOB = "__ASSET_JOB"
"""Dagster's name of the job of runs of assets that the page launches"""
PAGE = 200
"""runs read at once"""


def streams_of(repository: dg.RepositoryDefinition | None) -> dict[str, dg.PartitionsDefinition | None]:
    """Map each stream of a code location to the partitions of its restored state, by the tags of its assets.

    So one sensor or schedule serves all streams, however their definitions came together.
    """
    keys = keys_in(repository)
    restored = {name: repository.asset_graph.get(keys[name]).partitions_def for name in keys} if repository else {}
    found: dict[str, dg.PartitionsDefinition | None] = dict.fromkeys(sorted({name.path[0] for name in restored}))
    return found | {name.path[0]: partitions for name, partitions in restored.items() if partitions}


def keys_in(repository: dg.RepositoryDefinition | None) -> Keys:
    """Find the keys of all assets of streams in a code location."""
    graph = repository.asset_graph if repository else None
    return Keys.of(map(graph.get, graph.get_all_asset_keys()) if graph else ())


def stream_of(run: dg.DagsterRun) -> str | None:
    """Return the stream of a run: by its tag, its configuration, or the assets that it was launched to make."""
    keys = sorted(run.asset_selection or ())
    return run.tags.get(STREAM_TAG) or _configured_stream(run.run_config) or (keys[0].path[0] if keys else None)


def _configured_stream(config: Mapping[str, Any]) -> str | None:
    """Return the stream in the configuration of an operation's only op."""
    for op in (config.get("ops") or {}).values():
        if isinstance(name := ((op or {}).get("config") or {}).get("stream"), str):
            return name
    return None


def operation_of(run: dg.DagsterRun) -> str | None:
    """Return what a run does to its stream; of a run of assets that the page launched, which assets it makes."""
    selected = {asset_of(key)[1] for key in run.asset_selection or ()}
    return run.tags.get(OPERATION_TAG) or (
        RUN if selected & {CHECKPOINTS, *OF_OPERATORS} else ",".join(sorted(selected))
    )


def list_runs(instance: dg.DagsterInstance, *statuses: dg.DagsterRunStatus, **more: Any) -> Iterator[dg.RunRecord]:
    """List the runs with one of these statuses, newest first, page by page.

    Args:
        more: further conditions, as `dg.RunsFilter` takes them.
    """
    cursor = None
    while True:
        records = instance.get_run_records(dg.RunsFilter(statuses=statuses, **more), limit=PAGE, cursor=cursor)
        yield from records
        if len(records) < PAGE:
            return
        cursor = records[-1].dagster_run.run_id


def find_unfinished(
    instance: dg.DagsterInstance, operation: str, statuses: tuple[dg.DagsterRunStatus, ...] = UNFINISHED
) -> dict[str, str]:
    """Map each stream to a waiting or active run of an operation, if there is one."""
    tagged = list_runs(instance, *statuses, tags={OPERATION_TAG: operation})
    of_page = list_runs(instance, *statuses, job_name=ASSET_JOB)
    runs = (record.dagster_run for record in (*tagged, *of_page))
    return {name: run.run_id for run in runs if operation_of(run) == operation and (name := stream_of(run))}
