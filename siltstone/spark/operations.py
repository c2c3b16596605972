"""What a user can do to a stream, one function each: the command line, the jobs and the assets all call these."""

import logging
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from pyspark.sql import SparkSession

from siltstone.catalog.place import Place
from siltstone.catalog.records import SnapshotRecord, parse_time
from siltstone.changelog.upload_metrics import UploadStatistics, openmetrics
from siltstone.errors import Fenced, ProofFailed, StateError, Unreachable, UsageError
from siltstone.lifecycle.definition import check_recorded, check_run
from siltstone.lifecycle.export import (
    chosen,
    discard,
    publish,
    recorded_digest,
    restore_unit,
    staging,
    unit_tasks,
    whole_digest,
)
from siltstone.lifecycle.lease import reading, this_process
from siltstone.lifecycle.materialize import Materialized
from siltstone.lifecycle.materialize import materialize as materialize_operator
from siltstone.lifecycle.region import Completed, Region, RegionOptions
from siltstone.lifecycle.restore import chain_manifests, read_manifest, read_manifests
from siltstone.lifecycle.snapshot import compare, compare_tasks, snapshot_tasks, take_snapshot
from siltstone.lifecycle.verify import Failure, check_indexes, check_objects, plan_proof, prove
from siltstone.policy.adaptive import named
from siltstone.settings import Settings
from siltstone.spark.executor import spark_map
from siltstone.spark.runner import StreamRunner, open_source, run_stream
from siltstone.spark.session import needs_spark, spark_session
from siltstone.store.filesystem import reaching
from siltstone.stream import Stream

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunResult:
    """What one run did. `digest` is that of the newest checkpoint, hex; `uploads` is `UploadStatistics.summary`."""

    stream: str
    checkpoints: list[int]
    digest: str | None
    rows: int
    bytes: int
    seconds: float
    uploads: Mapping[str, float]


@dataclass(frozen=True)
class RunRequest:
    """How much to run: `batches` micro-batches at most, or, with `follow`, on and on; `options` go to the source.

    `openmetrics` is a file that holds the run's upload metrics so far, as OpenMetrics text, after each checkpoint.
    """

    batches: int | None = None
    follow: bool = False
    options: Mapping[str, str] = field(default_factory=dict)
    openmetrics: Path | None = None


@needs_spark
def run(
    settings: Settings,
    stream: Stream,
    request: RunRequest,
    on_checkpoint: Callable[[Completed], None] = lambda _: None,
) -> RunResult:
    """Process what the stream's source has, from the newest completed checkpoint on.

    Raises:
        SiltstoneError: see `Region.open`, `open_source` and `run_stream`.
    """
    start = time.perf_counter()
    done: list[Completed] = []
    uploads = UploadStatistics()

    def completed(checkpoint: Completed) -> None:
        nonlocal uploads
        done.append(checkpoint)
        uploads = uploads.merge(checkpoint.uploads)
        if request.openmetrics is not None:
            try:
                write_metrics(request.openmetrics, stream.name, uploads)
            except Unreachable as error:  # nobody's state depends on it
                _LOG.warning("%s", error)
        on_checkpoint(checkpoint)

    named(settings.policy, settings.policy_options)
    check_run(stream, request.options, settings.parallelism or 1)
    if request.openmetrics is not None:
        write_metrics(request.openmetrics, stream.name, uploads)
    with Place.writable(settings.warehouse, settings.catalog) as place:
        check_recorded(place.catalog, stream, request.options)
        spark = spark_session(settings.master, settings.spark)
        # Before the stream is taken over: a source that cannot be had changes nothing.
        rows = open_source(spark, stream, place.warehouse, request.options)
        with _running(settings, stream, place, spark, request, completed) as runner:
            run_stream(runner, rows, follow=request.follow)
        digest = done[-1].digest if done else runner.region.digest
    return RunResult(
        stream=stream.name,
        checkpoints=[c.id for c in done],
        digest=digest,
        rows=sum(c.rows_in for c in done),
        bytes=sum(c.bytes for c in done),
        seconds=round(time.perf_counter() - start, 3),
        uploads=uploads.summary(),
    )


def write_metrics(path: Path, stream: str, uploads: UploadStatistics) -> None:
    """Replace the file that holds a run's metrics, at once, so that a collector never reads half of it.

    Raises:
        Unreachable: it cannot be written.
    """
    written = path.with_name(f".{path.name}.partial")
    with reaching(f"write the metrics to {path}"):
        written.write_text(openmetrics(uploads, {"stream": stream}))
        written.replace(path)


@contextmanager
def stream_runner(settings: Settings, stream: Stream, spark: SparkSession) -> Iterator[StreamRunner]:
    """Take a stream over for a query of the user's own: give the runner to `foreachBatch`.

    The stream's source is not used. Leave the block when the query has ended.

    Raises:
        SiltstoneError: see `Region.open`.
    """
    with (
        Place.writable(settings.warehouse, settings.catalog) as place,
        _running(settings, stream, place, spark, RunRequest(), lambda _: None) as runner,
    ):
        yield runner
        if runner.failure is None:
            runner.finish()


@contextmanager
def _running(
    settings: Settings,
    stream: Stream,
    place: Place,
    spark: SparkSession,
    request: RunRequest,
    on_checkpoint: Callable[[Completed], None],
) -> Iterator[StreamRunner]:
    """One writer epoch: taken at the start, and how it ended noted in the catalog."""
    region = open_region(settings, stream, place, request.options, spark.sparkContext.defaultParallelism)
    outcome = "failed"
    try:
        runner = StreamRunner(spark, region, max_steps=request.batches, on_checkpoint=on_checkpoint)
        yield runner
        outcome = "done" if runner.failure is None else "failed"
    except Fenced:
        outcome = "fenced"
        raise
    except KeyboardInterrupt:
        outcome = "interrupted"
        raise
    finally:
        # How it ended is a note for people; what ended it must not be hidden by a catalog that is away.
        with suppress(Unreachable):
            region.close(outcome)


def open_region(
    settings: Settings,
    stream: Stream,
    place: Place,
    options: Mapping[str, str],
    default_parallelism: int,
) -> Region:
    """Take a stream over, as the settings say."""
    region_options = RegionOptions(
        parallelism=settings.parallelism or min(default_parallelism, stream.max_parallelism),
        backend=settings.backend,
        checkpoint_steps=settings.checkpoint_steps,
        checkpoint_s=settings.checkpoint_s,
        options=options,
        upload=settings.upload,
    )
    policy = named(settings.policy, settings.policy_options)
    return Region.open(stream, place.warehouse, place.catalog, policy, region_options, this_process())


@dataclass(frozen=True)
class RestoreResult:
    """What a restore rebuilt. `proven`: the digest of what was rebuilt is the recorded one."""

    stream: str
    checkpoint: int
    rows: int
    bytes: int
    seconds: float
    digest: str
    proven: bool
    path: str | None = None


@needs_spark
def restore(
    settings: Settings,
    stream: str,
    *,
    at: str = "latest",
    as_of: str | None = None,
    to: Path | None = None,
    only: Sequence[str] = (),
) -> RestoreResult:
    """Rebuild a checkpoint's state from the store, prove it, and write it as Parquet where `to` says.

    Args:
        at: checkpoint id, commit time, or "latest".
        as_of: event time instead: the last checkpoint whose highest event time is not later.
        to: a directory that does not exist yet; None only proves.
        only: operators, or variables as `OPERATOR.VARIABLE`, to restore, and so to read, nothing else; the digest is
            then theirs.

    Raises:
        UnknownStream, UnknownCheckpoint: nothing answers to the name, id or time.
        UsageError: `only` names what is not there.
        CorruptObject, ProofFailed: the chain is damaged; nothing is left at `to`.
    """
    with Place.existing(settings.warehouse, settings.catalog) as place:
        catalog, store = place.catalog, place.warehouse.store
        checkpoint = catalog.as_of(stream, parse_time(as_of)) if as_of else catalog.resolve(stream, at)
        record = catalog.checkpoint(stream, checkpoint)
        staged = None if to is None else staging(to)
        try:
            with reading(catalog, stream, [checkpoint], what="restores"):
                spark = spark_session(settings.master, settings.spark)
                start = time.perf_counter()
                manifests = read_manifests(store, chain_manifests(catalog, stream, checkpoint))
                parallelism = settings.parallelism or spark.sparkContext.defaultParallelism
                manifest = manifests[checkpoint]
                wanted = chosen(manifest, only) if only else None
                tasks, size = unit_tasks(manifests, checkpoint, parallelism, staged, wanted)
                results = spark_map(spark, lambda task: restore_unit(store, task), tasks)
                digest = whole_digest(results, manifest.max_parallelism)
                recorded = record.digest if wanted is None else recorded_digest(manifest, wanted)
                if digest != recorded:
                    raise ProofFailed(
                        f"checkpoint {checkpoint} of {stream}: digest {digest} is not the recorded {recorded}"
                    )
                seconds = time.perf_counter() - start
                if staged is not None and to is not None:
                    publish(staged, to.absolute())
        except BaseException:
            if staged is not None:
                discard(staged)
            raise
    rows = sum(result.rows for result in results)
    return RestoreResult(stream, checkpoint, rows, size, round(seconds, 3), digest, True, str(to) if to else None)


@dataclass(frozen=True)
class VerifyResult:
    """Which checkpoints are proven, and why the others are not."""

    stream: str
    proven: list[int]
    failed: list[Failure]
    seconds: float


@needs_spark
def verify(
    settings: Settings, stream: str, *, at: str = "latest", every: bool = False, deep: bool = False
) -> VerifyResult:
    """Prove one checkpoint, or with `every` all of them; the outcome is recorded in the catalog.

    Args:
        deep: also compare, row by row, with the full snapshot of each checkpoint that has one.

    Raises:
        UnknownStream, UnknownCheckpoint: nothing answers to the name, id or time.
        UsageError: `deep` for a checkpoint that has no snapshot.
    """
    with Place.existing(settings.warehouse, settings.catalog) as place:
        catalog, store = place.catalog, place.warehouse.store
        wanted = [c.id for c in catalog.checkpoints(stream)] if every else [catalog.resolve(stream, at)]
        snapshots = {s.checkpoint: s for s in catalog.snapshots(stream)}
        if deep and not snapshots.keys() & set(wanted):
            raise UsageError(f"no snapshot of {stream} to compare with: take one with `siltstone snapshot {stream}`")
        spark = spark_session(settings.master, settings.spark)
        start = time.perf_counter()
        with reading(catalog, stream, wanted, what="verifies"):
            chains = {c: catalog.chain(stream, c) for c in wanted}
            stored = {
                c: catalog.checkpoint(stream, c).manifest
                for c in sorted({c for chain in chains.values() for c in chain})
            }
            materialized = {m.id: m for c in wanted for m in catalog.chain_materializations(stream, c)}
            plan = plan_proof(store, stored, chains, [m.manifest for m in materialized.values() if m.manifest])
            proofs = spark_map(spark, lambda task: prove(store, task), plan.tasks)
            failures = [*plan.failures, *(f for proof in proofs for f in proof.failures)]
            checked = spark_map(spark, lambda checks: check_indexes(store, checks), plan.indexes)
            failures += [failure for found in checked for failure in found]
            taken = [(stored, [c]) for c, s in snapshots.items() if c in chains for stored in s.objects]
            failures += check_objects(store, taken)
            if deep:
                failures += _deep(settings, spark, place, [s for c, s in snapshots.items() if c in wanted])
        first = {f.checkpoint: f for f in reversed(failures) if f.checkpoint in chains}
        for checkpoint in wanted:
            failure = first.get(checkpoint)
            # The slowest unit: with a core for each, this is how long the restore takes.
            restore_s = max((p.restore_s.get(checkpoint, 0.0) for p in proofs), default=0.0)
            read = sum(p.restore_bytes.get(checkpoint, 0) for p in proofs)
            measured = {} if failure else {"restore_s": round(restore_s, 6), "restore_bytes": read}
            catalog.record_proof(stream, checkpoint, failure is None, failure.reason if failure else None, **measured)
        seconds = round(time.perf_counter() - start, 3)
    return VerifyResult(stream, [c for c in wanted if c not in first], [first[c] for c in sorted(first)], seconds)


def _deep(settings: Settings, spark: SparkSession, place: Place, snapshots: list[SnapshotRecord]) -> list[Failure]:
    """Row by row against the full snapshots."""
    store = place.warehouse.store
    failures = []
    for snapshot in snapshots:
        stored = chain_manifests(place.catalog, snapshot.stream, snapshot.checkpoint)
        try:
            manifests = read_manifests(store, stored)
            parallelism = settings.parallelism or spark.sparkContext.defaultParallelism
            tasks, _ = unit_tasks(manifests, snapshot.checkpoint, parallelism, None)
            compared = spark_map(spark, lambda task: compare(store, task), compare_tasks(tasks, snapshot.objects))
            failures += [Failure(snapshot.checkpoint, line) for lines in compared for line in lines]
        except StateError as error:
            failures.append(Failure(snapshot.checkpoint, str(error)))
    return failures


@dataclass(frozen=True)
class SnapshotResult:
    """What a snapshot wrote."""

    stream: str
    checkpoint: int
    rows: int
    bytes: int
    seconds: float


@needs_spark
def snapshot(settings: Settings, stream: str) -> SnapshotResult:
    """Write the live state of the newest checkpoint in full, to compare restores against (`verify --deep`).

    Raises:
        StateError: this machine does not have the live state of the newest checkpoint.
        UsageError: the checkpoint has a snapshot already.
    """
    with Place.existing(settings.warehouse, settings.catalog) as place:
        catalog, warehouse = place.catalog, place.warehouse
        epoch, record = catalog.stream(stream).epoch, catalog.latest(stream)
        if any(s.checkpoint == record.id for s in catalog.snapshots(stream)):
            raise UsageError(f"checkpoint {record.id} of {stream} has a snapshot already")
        spark = spark_session(settings.master, settings.spark)
        start = time.perf_counter()
        # The lease also covers what is written and not referred to yet.
        with reading(catalog, stream, [record.id], what="takes a snapshot"):
            manifest = read_manifest(warehouse.store, record.manifest)
            tasks = snapshot_tasks(warehouse, manifest, settings.backend, f"s{os.getpid()}-{time.time_ns():x}")
            parts = spark_map(spark, take_snapshot, tasks)
            objects = [stored for part in parts for stored in part.objects]
            rows = sum(part.rows for part in parts)
            catalog.add_snapshot(stream, epoch, record.id, objects, rows)
        seconds = round(time.perf_counter() - start, 3)
    return SnapshotResult(stream, record.id, rows, sum(o.bytes for o in objects), seconds)


@dataclass(frozen=True)
class MaterializeResult:
    """What was materialized at a checkpoint: rows and bytes of all new bases, and what each operator came to.

    `kept` are operators whose chains begin at the checkpoint anyway.
    """

    stream: str
    checkpoint: int
    rows: int
    bytes: int
    seconds: float
    operators: list[Materialized]
    kept: list[str]


@needs_spark
def materialize(
    settings: Settings,
    stream: str,
    *,
    at: str = "latest",
    operators: Sequence[str] = (),
    on_operator: Callable[[str], None] = lambda _: None,
) -> MaterializeResult:
    """Consolidate the chains of a checkpoint into new bases, which it and all later ones begin with from then on.

    The stream may run meanwhile; it is not waited for and does not wait.

    Args:
        operators: those to materialize, one after the other; all, if none is named.
        on_operator: called with each as its turn comes.

    Raises:
        UnknownStream, UnknownCheckpoint: nothing answers to the name, id or time.
        UsageError: there is no such operator, or another process is materializing it.
        CorruptObject, ProofFailed: a chain is damaged; nothing of that operator changed.
    """
    start = time.perf_counter()
    with Place.existing(settings.warehouse, settings.catalog) as place:
        checkpoint = place.catalog.resolve(stream, at)
        begins = place.catalog.firsts(stream, checkpoint)
        unknown = sorted(set(operators) - begins.keys())
        if unknown:
            known = ", ".join(sorted(begins))
            raise UsageError(f"checkpoint {checkpoint} of {stream} has no operator {unknown[0]!r}: it has {known}")
        wanted = [name for name in begins if name in (operators or begins)]
        kept = [name for name in wanted if begins[name] == checkpoint]
        done = []
        for name in (name for name in wanted if name not in kept):
            on_operator(name)
            spark = spark_session(settings.master, settings.spark)
            parallelism = settings.parallelism or spark.sparkContext.defaultParallelism
            run, id = partial(spark_map, spark), uuid.uuid4().hex
            done.append(materialize_operator(place, stream, name, checkpoint, id=id, parallelism=parallelism, run=run))
    rows, size = sum(m.rows for m in done), sum(m.bytes for m in done)
    return MaterializeResult(stream, checkpoint, rows, size, round(time.perf_counter() - start, 3), done, kept)
