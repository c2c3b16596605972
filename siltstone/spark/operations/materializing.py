"""Consolidate chains into new bases."""

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial

from siltstone.catalog.records.checkpoints import CheckpointRecord
from siltstone.catalog.records.savepoints import SavepointRecord
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.due import find_beginnings, materialization_health
from siltstone.chains.materialize import HeldWhole, Materialized
from siltstone.chains.materialize import materialize as materialize_operator
from siltstone.errors import UsageError
from siltstone.model import Form
from siltstone.result import Result
from siltstone.retention.leases import hold_lease
from siltstone.retention.savepoints import check_savepoint, set_savepoint
from siltstone.run.definition import check_parallelism
from siltstone.settings import Settings
from siltstone.spark.executor import spark_map
from siltstone.spark.session import cores, needs_spark, spark_session


@dataclass(frozen=True)
class MaterializeResult(Result):
    """What was materialized at a checkpoint.

    Attributes:
        rows, bytes: totals of all new bases.
        operators: the new bases of each operator.
        kept: operators that a restore of the checkpoint already reads without any delta.
        triggers: operator -> why it was due; empty unless only due operators were to be materialized.
    """

    stream: str
    checkpoint: int
    rows: int
    bytes: int
    seconds: float
    operators: list[Materialized]
    kept: list[str]
    triggers: dict[str, str] = field(default_factory=dict)


@needs_spark
def materialize(
    settings: Settings,
    stream: str,
    *,
    at: str = "latest",
    operators: Sequence[str] = (),
    due: bool = False,
    on_operator: Callable[[str], None] = lambda _: None,
) -> MaterializeResult:
    """Materialize operators one after the other, in Spark tasks (`StreamClient.materialize`)."""
    start = time.perf_counter()
    with OpenWarehouse.open_existing(settings.warehouse, settings.catalog) as warehouse:
        checkpoint = warehouse.catalog.checkpoints.resolve(stream, at)
        check_parallelism(settings.parallelism or 1, warehouse.catalog.streams.get(stream).max_parallelism)
        record = warehouse.catalog.checkpoints.get(stream, checkpoint)
        begins = find_beginnings(warehouse.catalog, record)
        unknown = sorted(set(operators) - begins.keys())
        if unknown:
            known = ", ".join(sorted(begins))
            raise UsageError(f"checkpoint {checkpoint} of {stream} has no operator {unknown[0]!r}: it has {known}")
        wanted = [name for name in begins if name in (operators or begins)]
        triggers: dict[str, str] = {}
        if due:
            options = settings.materialization, settings.policy_options
            health = materialization_health(warehouse.catalog, stream, *options)
            triggers = {name: h.trigger.reason for name, h in health.items() if h.trigger and name in wanted}
            wanted = list(triggers)
        in_files = find_in_files(warehouse, record)
        kept = [name for name in wanted if begins[name] == checkpoint and name not in in_files]
        done, held = list[Materialized](), list[str]()
        # Take the lease before Spark starts, because others may be deleting.
        with hold_lease(warehouse.catalog, stream, [checkpoint], what="materializes"):
            for name in (name for name in wanted if name not in kept):
                on_operator(name)
                spark = spark_session(settings.master, settings.spark)
                parallelism = settings.parallelism or cores(spark)
                materialize_one = partial(materialize_operator, warehouse, stream, name, checkpoint)
                run, id = partial(spark_map, spark, on=warehouse.warehouse), uuid.uuid4().hex
                try:
                    done.append(materialize_one(id=id, parallelism=parallelism, run=run, upload=settings.upload))
                except HeldWhole:
                    held.append(name)
    rows, size = sum(m.rows for m in done), sum(m.bytes for m in done)
    return MaterializeResult(
        stream, checkpoint, rows, size, round(time.perf_counter() - start, 3), done, [*kept, *held], triggers
    )


def find_in_files(warehouse: OpenWarehouse, record: CheckpointRecord) -> set[str]:
    """Find the operators that a restore of a checkpoint reads from files, which bases may stand for."""
    chain = warehouse.catalog.materializations.list_in_chain(record.stream, record.id)
    # Bases of a checkpoint before do not stand for the files of this one.
    based = {m.operator for m in chain if m.checkpoint == record.id}
    return {name for name, form in record.forms.items() if form is Form.FILES} - based


def full_savepoint(
    settings: Settings, stream: str, name: str, *, at: str = "latest", expires_in: timedelta | None = None
) -> SavepointRecord:
    """Materialize a checkpoint, and name it: a savepoint that is read without any delta.

    If it is killed in between, there is no savepoint; repeated, it finds what was materialized. Arguments and errors
    are those of `StreamClient.materialize` and `set_savepoint`.
    """
    with OpenWarehouse.open_existing(settings.warehouse, settings.catalog) as warehouse:
        check_savepoint(warehouse.catalog, stream, name)
        checkpoint = warehouse.catalog.checkpoints.resolve(stream, at)
        with hold_lease(warehouse.catalog, stream, [checkpoint], what=f"makes savepoint {name}"):
            materialize(settings, stream, at=str(checkpoint))
            return set_savepoint(warehouse.catalog, stream, name, at=str(checkpoint), expires_in=expires_in)
