"""Runs of Dagster's jobs in the test's own process, on the tests' own Spark, and what their events say."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import dagster as dg
import pytest

from siltstone.dagster import stream_definitions
from siltstone.stream import Stream


@dataclass
class Wing:
    """Definitions of one stream, its warehouse, and an instance that remembers runs."""

    stream: Stream
    warehouse: str
    instance: dg.DagsterInstance
    definitions: dg.Definitions = field(init=False)

    def __post_init__(self) -> None:
        self.definitions = stream_definitions(self.stream)

    def key(self, asset: str) -> dg.AssetKey:
        """`<stream>/<asset>`."""
        return dg.AssetKey([self.stream.name, *asset.split("/")])

    def job(
        self, operation: str = "", *, tags: Mapping[str, str] | None = None, **config: Mapping[str, Any]
    ) -> dg.ExecuteInProcessResult:
        """Run the stream's job, or that of an operation; `config` is by step, without the stream's name."""
        job = self.definitions.resolve_job_def(f"siltstone__{operation}" if operation else self.stream.name)
        op = f"siltstone__{operation}__op"
        more = {op: {"stream": self.stream.name}} if op in {node.name for node in job.all_node_defs} else {}
        return self._execute(job, config, more, tags=tags)

    def make(
        self, *assets: str, partitions: Sequence[str] = (), **config: Mapping[str, Any]
    ) -> dg.ExecuteInProcessResult:
        """Make some assets in one run, as the page does; with all their checks. `partitions`: the first to the last."""
        tags = {}
        if len(partitions) > 1:
            tags = {
                "dagster/asset_partition_range_start": partitions[0],
                "dagster/asset_partition_range_end": partitions[-1],
            }
        return self._execute(
            self.definitions.resolve_implicit_global_asset_job_def(),
            config,
            asset_selection=[self.key(asset) for asset in assets],
            partition_key=partitions[0] if len(partitions) == 1 else None,
            tags=tags,
        )

    def prove(self, check: dg.AssetCheckKey, partitions: Sequence[str]) -> dg.ExecuteInProcessResult:
        """Make one partitioned check of a range of partitions, and nothing else."""
        job = dg.define_asset_job("prove", selection=dg.AssetSelection.checks(check))
        definitions = dg.Definitions.merge(self.definitions, dg.Definitions(jobs=[job]))
        tags = {
            "dagster/asset_partition_range_start": partitions[0],
            "dagster/asset_partition_range_end": partitions[-1],
        }
        return self._execute(definitions.resolve_job_def("prove"), {}, tags=tags)

    def _execute(
        self,
        job: dg.JobDefinition,
        config: Mapping[str, Mapping[str, Any]],
        more_config: Mapping[str, Mapping[str, Any]] | None = None,
        **more: Any,
    ) -> dg.ExecuteInProcessResult:
        of_steps = {f"{self.stream.name}__{step}": given for step, given in config.items()} | dict(more_config or {})
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SILTSTONE_WAREHOUSE", self.warehouse)
            return job.execute_in_process(
                run_config={"ops": {op: {"config": given} for op, given in of_steps.items()}},
                instance=self.instance,
                raise_on_error=False,
                **more,
            )


@dataclass(frozen=True)
class Made:
    """One event of an asset."""

    asset: str
    partition: str | None
    version: str
    metadata: dict[str, Any]


def made(result: dg.ExecuteInProcessResult) -> dict[str, Made]:
    """The asset events of a run, by asset without the stream's name, `asset@partition` where there is one; one each."""
    found: dict[str, Made] = {}
    for event in result.get_asset_materialization_events():
        said = event.step_materialization_data.materialization
        asset = "/".join(said.asset_key.path[1:])
        name = f"{asset}@{said.partition}" if said.partition else asset
        assert name not in found, f"{name} was told of twice"
        version = (said.tags or {})["dagster/data_version"]
        found[name] = Made(asset, said.partition, version, plain(said.metadata))
    return found


def checked(result: dg.ExecuteInProcessResult) -> dict[str, dg.AssetCheckEvaluation]:
    """The checks of a run, by name."""
    return {evaluation.check_name: evaluation for evaluation in result.get_asset_check_evaluations()}


def plain(metadata: Mapping[str, dg.MetadataValue]) -> dict[str, Any]:
    """Values without their types; a table is a list of rows."""
    return {
        name: [dict(row.data) for row in value.records] if isinstance(value, dg.TableMetadataValue) else value.value
        for name, value in metadata.items()
    }


def failure(result: dg.ExecuteInProcessResult) -> tuple[str, dict[str, Any]]:
    """What the failed step says, and the metadata with it."""
    assert not result.success
    (event,) = [e for e in result.all_events if e.is_step_failure]
    data = event.step_failure_data
    said = data.user_failure_data
    assert said is not None, data.error
    assert data.error is not None and data.error.cause is None, "the line is all there is to read"
    return said.description or "", plain(said.metadata)
