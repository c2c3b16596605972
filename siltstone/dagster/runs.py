"""Find the runs of streams among all runs of a Dagster instance: of which streams a run is, and which go on."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import dagster as dg

from siltstone.dagster.names import OPERATION_TAG, STREAM_TAG, Keys, asset_of, dagster_name, is_shared, location_name
from siltstone.pipes.parts import CHECKPOINTS, OF_OPERATORS

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


@dataclass(frozen=True)
class StreamRuns:
    """The runs of an instance, seen from one code location.

    Attributes:
        keys: the keys of its assets.
        location: its name; None for any. Other locations may have streams of the same names.
    """

    instance: dg.DagsterInstance
    keys: Keys
    location: str | None = None

    @classmethod
    def of(cls, context: dg.SensorEvaluationContext) -> "StreamRuns":
        """See the runs from the code location of a sensor."""
        origin = context.code_location_origin
        return cls(context.instance, keys_in(context.repository_def), origin.location_name if origin else None)

    @cached_property
    def streams(self) -> frozenset[str]:
        """The streams of the code location."""
        return frozenset(name.path[0] for name in self.keys)

    @cached_property
    def _names(self) -> Mapping[dg.AssetKey, dg.AssetKey]:
        return {key: name for name, key in self.keys.items()}

    def is_here(self, run: dg.DagsterRun) -> bool:
        """Whether a run may be one of this code location."""
        origin = run.remote_job_origin
        return not (self.location and origin and origin.location_name != self.location)

    def streams_of(self, run: dg.DagsterRun) -> set[str]:
        """Return the streams of a run: by its tag, its configuration, or what it was launched to make or check.

        A run of a job of all streams, launched without a selection, is of all.
        """
        if not self.is_here(run):
            return set()
        if name := run.tags.get(STREAM_TAG) or _configured_stream(run):
            return {name}
        selected = self._selected(run)
        if not selected and is_shared(run.job_name):
            return set(self.streams)
        return {name.path[0] for name in selected}

    def operation_of(self, run: dg.DagsterRun) -> str | None:
        """Return what a run does to its streams; of a run of assets that the page launched, which assets it makes."""
        parts = {asset_of(name)[1] for name in self._selected(run)}
        of_page = RUN if parts & {CHECKPOINTS, *OF_OPERATORS} else ",".join(sorted(parts))
        return run.tags.get(OPERATION_TAG) or of_page

    def _selected(self, run: dg.DagsterRun) -> set[dg.AssetKey]:
        """Return the names of the assets that a run makes, or else of those that it checks."""
        checked = {check.asset_key for check in run.asset_check_selection or ()}
        return {self._names[key] for key in run.asset_selection or checked if key in self._names}

    def list(self, *statuses: dg.DagsterRunStatus, **more: Any) -> Iterator[dg.RunRecord]:
        """List the runs of the instance with one of these statuses, newest first, page by page.

        Args:
            more: further conditions, as `dg.RunsFilter` takes them.
        """
        cursor = None
        while True:
            records = self.instance.get_run_records(dg.RunsFilter(statuses=statuses, **more), limit=PAGE, cursor=cursor)
            yield from records
            if len(records) < PAGE:
                return
            cursor = records[-1].dagster_run.run_id

    def find_unfinished(
        self, operation: str, statuses: tuple[dg.DagsterRunStatus, ...] = UNFINISHED
    ) -> Mapping[str, str]:
        """Map each stream to a waiting or active run of an operation, if there is one."""
        found = dict[str, str]()
        tagged = self.list(*statuses, tags={OPERATION_TAG: operation})
        of_page = self.list(*statuses, job_name=ASSET_JOB)
        for run in (record.dagster_run for record in (*tagged, *of_page)):
            if self.operation_of(run) == operation:
                found |= dict.fromkeys(self.streams_of(run), run.run_id)
        return found


def op_config(operation: str, stream: str) -> dict[str, Any]:
    """Make the run config of an operation of one op on a stream."""
    return {"ops": {location_name(operation, "op"): {"config": {"stream": stream}}}}


def _configured_stream(run: dg.DagsterRun) -> str | None:
    """Return the stream that the config of a run of an op names (`op_config`); a schedule or a person wrote it."""
    found: Any = run.run_config if is_shared(run.job_name) else None
    for name in ("ops", dagster_name(run.job_name, "op"), "config", "stream"):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found if isinstance(found, str) else None
