"""Checks of `siltstone doctor`: of the warehouse as a whole, then of each stream. None of them changes anything."""

import os
import platform
import shlex
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path

from siltstone.catalog import epochs
from siltstone.catalog.database.engine import parse_url
from siltstone.catalog.database.tables import REVISION
from siltstone.catalog.identity import inspect_identity
from siltstone.catalog.records.processes import is_known_dead, is_known_gone
from siltstone.catalog.repository import Catalog
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.due import materialization_health
from siltstone.change.recovery_point import describe_checkpoints
from siltstone.doctor.findings import Finding, State
from siltstone.errors import CorruptObject
from siltstone.format.manifests import read_manifest
from siltstone.retention.deletion import foresee
from siltstone.retention.retention_rules import retention_in_force
from siltstone.settings import Settings
from siltstone.store.identity import read_identity
from siltstone.store.open import Warehouse
from siltstone.store.paths import IDENTITY
from siltstone.store.private import VARIABLE, own_umask

_SKEW_WARNING, _SKEW_PROBLEM = timedelta(seconds=1), timedelta(seconds=30)
_FREE_WARNING, _FREE_PROBLEM, _FREE_PROBLEM_BYTES = 0.10, 0.01, 100_000_000
_PACKAGES = ("siltstone", "pyspark", "pyarrow")


def check_catalog(catalog: Catalog) -> list[Finding]:
    """Report an open catalog, which has the right revision, and how long it takes to answer.

    Raises:
        Unreachable: it does not answer.
    """
    began = time.monotonic()
    count = len(catalog.streams.list())
    said = f"{catalog.url}, revision {REVISION}, streams: {count}, answers in {_milliseconds(began)}"
    return [Finding("catalog", "ok", said)]


def check_clock(catalog: Catalog) -> list[Finding]:
    """Compare this machine's clock with the catalog's; for SQLite they are the same.

    Raises:
        Unreachable: the catalog does not answer.
    """
    before = datetime.now(UTC)
    theirs = catalog.now()
    after = datetime.now(UTC)
    behind, ahead = theirs - after, before - theirs
    skew = max(behind, ahead, timedelta(0))
    if skew <= _SKEW_WARNING:
        return [Finding("clock", "ok", "this machine's is the catalog's, within 1 s")]
    said = f"this machine's is {skew.total_seconds():.0f} s {'behind' if behind > ahead else 'ahead of'} the catalog's"
    said += ": retention and leases go by the catalog's, times in logs and of checkpoints in files by this machine's"
    state = "problem" if skew > _SKEW_PROBLEM else "warning"
    return [Finding("clock", state, said, "set both clocks by NTP")]


def check_store(warehouse: Warehouse) -> list[Finding]:
    """Check that the store answers and can be written, as a run does before it begins, and report its remarks.

    Raises:
        UsageError, Unreachable: as `Store.check`.
    """
    warehouse.check_readable()
    store = warehouse.store
    began = time.monotonic()
    next(iter(store.list(IDENTITY)), None)
    answered = _milliseconds(began)
    store.check(writable=True)
    found = [Finding("store", "ok", f"{store.label}, can be written, answers in {answered}")]
    for remark in store.remarks():
        found.append(Finding("store", "warning" if remark.advice else "ok", remark.found, remark.advice))
    return found


def check_lost_catalog(warehouse: Warehouse) -> list[Finding]:
    """Check, where no catalog can be opened, whether the store had one.

    Raises:
        CorruptObject, NewerFormat, Unreachable: as `read_identity`.
    """
    identity = read_identity(warehouse.store)
    if identity is None:
        return []
    said = f"the store holds warehouse {identity}, whose catalog cannot be opened"
    advice = "name it with --catalog; if it is lost: `siltstone restore-catalog`, or `siltstone rebuild-catalog`"
    return [Finding("identity", "problem", said, advice)]


def check_identity(warehouse: Warehouse, catalog: Catalog) -> list[Finding]:
    """Check that the store and the catalog belong together.

    Raises:
        WrongWarehouse, CorruptObject, NewerFormat, Unreachable: as `catalog.identity.check_identity`.
    """
    identity = inspect_identity(warehouse, catalog)
    said = f"{identity}, in the store and in the catalog" if identity else "none yet: the next run writes it"
    return [Finding("identity", "ok", said)]


def check_permissions(warehouse: Warehouse, catalog_url: str) -> list[Finding]:
    """Check that no other user of this machine may use the warehouse's directory, or a catalog in SQLite.

    A catalog's file in a private directory is private whatever its own permissions are.
    """
    url, found = parse_url(catalog_url), [_check_exposure(warehouse.local.root)]
    path = Path(str(url.database))
    if url.drivername == "sqlite" and _check_exposure(path.parent):
        found.append(_check_exposure(path))
    exposed = [each for each in found if each is not None]
    said = f"none on this machine are wider than umask {own_umask():03o} allows"
    return exposed or [Finding("permissions", "ok", said)]


def _check_exposure(path: Path) -> Finding | None:
    """Return a warning if more users may use the path than `SILTSTONE_UMASK` allows; None if not, or if absent."""
    try:
        mode = path.stat().st_mode & 0o777
    except OSError:  # another check reports it
        return None
    given = mode & own_umask()
    if not given:
        return None
    said = f"{path} has permissions {mode:04o}: others on this machine may use it"
    advice = f"chmod {mode & ~given:04o} {shlex.quote(str(path))}, or set {VARIABLE} if it is meant to be so"
    return Finding("permissions", "warning", said, advice)


def check_space(warehouse: Warehouse) -> list[Finding]:
    """Check the free space of this machine's file systems that hold the warehouse, its working state, and its objects
    if they are local."""
    paths = [warehouse.local.root] + ([] if warehouse.remote else [warehouse.local.objects])
    devices = {path.stat().st_dev: path for path in reversed(paths) if path.exists()}
    return [_space(path) for path in devices.values()]


def _space(path: Path) -> Finding:
    usage = shutil.disk_usage(path)
    share = usage.free / usage.total if usage.total else 1.0
    said = f"{path}: {usage.free / 1e9:,.1f} GB free, {share:.0%}"
    if share < _FREE_PROBLEM or usage.free < _FREE_PROBLEM_BYTES:
        state = "problem"
    elif share < _FREE_WARNING:
        state = "warning"
    else:
        return Finding("space", "ok", said)
    advice = "make room, or keep less: `siltstone truncate STREAM` deletes old checkpoints, `siltstone sweep` orphans"
    return Finding("space", state, said, advice)


def check_versions() -> list[Finding]:
    """Report the installed versions. Without PySpark, streams cannot run here."""
    versions = {name: _version(name) for name in _PACKAGES} | {"Python": platform.python_version()}
    said = ", ".join(f"{name} {version or 'is not installed'}" for name, version in versions.items())
    if None in versions.values():
        return [Finding("versions", "warning", said, "to run streams here, pip install 'siltstone[spark]'")]
    return [Finding("versions", "ok", said)]


def _version(package: str) -> str | None:
    """Return the version of a package; None if it is not installed. A platform's own packages may lack metadata."""
    if find_spec(package) is None:
        return None
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return import_module(package).__version__


def check_java(master: str) -> list[Finding]:
    """Check that Spark would find Java, without starting it. Spark Connect needs none here."""
    if master.startswith("sc://"):
        return [Finding("java", "ok", "none is needed with Spark Connect")]
    home = os.environ.get("JAVA_HOME")
    java = shutil.which(str(Path(home) / "bin" / "java") if home else "java")
    if java:
        return [Finding("java", "ok", java)]
    said = f"not found in JAVA_HOME, {home}" if home else "not found on the PATH, and JAVA_HOME is not set"
    return [Finding("java", "warning", said, "install Java 17 or newer and let JAVA_HOME point to it")]


def _milliseconds(began: float) -> str:
    return f"{(time.monotonic() - began) * 1000:.1f} ms"


@dataclass(frozen=True, slots=True)
class StreamSubject:
    """One stream, and what its checks need."""

    warehouse: OpenWarehouse
    settings: Settings
    name: str

    def finding(self, check: str, state: State, found: str, advice: str | None = None) -> Finding:
        """Make a finding about this stream."""
        return Finding(check, state, found, advice, self.name)


def check_run(subject: StreamSubject) -> list[Finding]:
    """Report who runs the stream, whether that process lives, and whether it makes checkpoints."""
    catalog, name = subject.warehouse.catalog, subject.name
    runs = catalog.runs.list(name)
    if not runs:
        return [subject.finding("run", "ok", "it has never run")]
    run = runs[-1]
    if run.ended_at is not None:
        return [subject.finding("run", "ok", f"none is running; epoch {run.epoch} ended {_iso(run.ended_at)}")]
    said = f"epoch {run.epoch}, by {run.who} since {_iso(run.started_at)}"
    if is_known_gone(run.who):
        advice = f"`siltstone run {name}` takes over and goes on from the newest checkpoint"
        return [subject.finding("run", "warning", f"{said}, has not ended, and its process is gone", advice)]
    newest = next(iter(catalog.checkpoints.list(name, 1)), None)
    still = catalog.now() - max(run.started_at, newest.committed_at if newest else run.started_at)
    if still > timedelta(seconds=subject.settings.alerts.still_s):
        said += f", has made no checkpoint for {still.total_seconds():.0f} s"
        advice = "see its log and its source; if it hangs, end it: the next run goes on from the newest checkpoint"
        return [subject.finding("run", "problem", said, advice)]
    return [subject.finding("run", "ok", said)]


def check_leases(subject: StreamSubject) -> list[Finding]:
    """Report who keeps checkpoints from deletion by reading them."""
    catalog, now = subject.warehouse.catalog, subject.warehouse.catalog.now()
    leases = catalog.leases.list(subject.name)
    over = [lease for lease in leases if lease.expires_at <= now or is_known_dead(lease.process)]
    live = [lease for lease in leases if lease not in over]
    found = []
    if over:
        said = f"{', '.join(lease.who for lease in over)}: expired, or of a process that has died"
        advice = "nothing: they keep nothing from deletion, and the next deletion or reader removes them"
        found.append(subject.finding("leases", "warning", said, advice))
    if live or not over:
        said = "; ".join(f"{lease.who}, until {_iso(lease.expires_at)} unless renewed" for lease in live)
        found.append(subject.finding("leases", "ok", said or "none"))
    return found


def check_proofs(subject: StreamSubject) -> list[Finding]:
    """Check that no checkpoint's newest proof failed."""
    name, records = subject.name, subject.warehouse.catalog.checkpoints.list(subject.name)
    failed = [record for record in records if record.proven is False]
    if not failed:
        proven = sum(record.proven is True for record in records)
        return [subject.finding("proofs", "ok", f"{proven} of {len(records)} checkpoints proven, none failed")]
    found = []
    for record in failed:
        advice = f"`siltstone recover {name}` goes back to the newest checkpoint that restores"
        if record.id != records[-1].id:
            advice = (
                f"`siltstone verify {name} --at {record.id}` proves it again, `siltstone delete {name} {record.id}` "
            )
            advice += "gives it up; if newer ones fail too, `siltstone recover " + name + "`"
        said = f"checkpoint {record.id} is not proven: {record.proof}"
        found.append(subject.finding("proofs", "problem", said, advice))
    return found


def check_materialization(subject: StreamSubject) -> list[Finding]:
    """Check that materialization keeps up, as `verify` does."""
    settings, name = subject.settings, subject.name
    health = materialization_health(subject.warehouse.catalog, name, settings.materialization, settings.policy_options)
    advice = f"`siltstone materialize {name}` does it now, and says why it fails"
    ill = [each for each in health.values() if not each.fine]
    found = [subject.finding("materialization", "problem", each.reason, advice) for each in ill]
    return found or [subject.finding("materialization", "ok", "keeps up" if health else "nothing to do yet")]


def check_outputs(subject: StreamSubject) -> list[Finding]:
    """Check that no outputs wait for a run that delivers them."""
    catalog, name = subject.warehouse.catalog, subject.name
    waiting = catalog.outbox.list(name, outstanding=True)
    if not waiting:
        return [subject.finding("outputs", "ok", "all are delivered")]
    said = f"{len(waiting)} not delivered yet, the oldest of checkpoint {waiting[0].checkpoint} to {waiting[0].name}"
    if _is_running(subject):
        return [subject.finding("outputs", "ok", f"{said}: the current run delivers them")]
    return [subject.finding("outputs", "warning", said, f"`siltstone run {name}` delivers them first")]


def check_deletions(subject: StreamSubject) -> list[Finding]:
    """Check that no deletion was interrupted. Waiting for checkpoints that build on it, or for readers, is normal."""
    catalog, name = subject.warehouse.catalog, subject.name
    marked = {
        each.id: each.deleted_at for each in catalog.checkpoints.list_retained(name) if each.deleted_at is not None
    }
    plan = foresee(catalog, name)
    going = sorted({*plan.goes, *(stored.checkpoint for stored in plan.objects)} & marked.keys())
    if not going:
        waiting = [f"{len(plan.waits)} marked checkpoints wait for newer ones that build on them"] if plan.waits else []
        waiting += [f"{len(plan.leased)} marked checkpoints are being read"] if plan.leased else []
        return [subject.finding("deletions", "ok", "; ".join(waiting) or "none under way")]
    since = _iso(min(marked[id] for id in going))
    said = f"unfinished: {len(going)} checkpoints ({describe_checkpoints(going)}), marked since {since}, with "
    said += f"{len(plan.objects):,} objects of {sum(each.bytes for each in plan.objects) / 1e6:,.1f} MB"
    rules = retention_in_force(catalog.streams.get(name).retention, subject.settings.retention)
    if rules.rules and _is_running(subject):
        return [subject.finding("deletions", "ok", f"{said}: the current run completes it")]
    advice = f"unless a deletion is running now: `siltstone delete {name} {going[0]}` completes it, as does any later "
    return [subject.finding("deletions", "warning", said, f"{advice}deletion")]


def check_manifest(subject: StreamSubject) -> list[Finding]:
    """Check that the newest checkpoint's manifest is in the store, intact, and the one in the catalog."""
    name, store = subject.name, subject.warehouse.warehouse.store
    newest = next(iter(subject.warehouse.catalog.checkpoints.list(name, 1)), None)
    if newest is None:
        return [subject.finding("manifest", "ok", "no checkpoint yet")]
    try:
        manifest = read_manifest(store, newest.manifest, name)
    except CorruptObject as error:
        advice = f"`siltstone recover {name}` goes back to the newest checkpoint that restores; --dry-run shows which"
        return [subject.finding("manifest", "problem", str(error), advice)]
    said = f"of checkpoint {manifest.checkpoint}, committed {_iso(newest.committed_at)}, is there and whole"
    return [subject.finding("manifest", "ok", said)]


def check_epochs(subject: StreamSubject) -> list[Finding]:
    """Check that the store has no run of the stream that the catalog does not know."""
    epochs.check_catalog(subject.warehouse, subject.name)
    return [
        subject.finding(
            "epochs", "ok", f"{subject.warehouse.catalog.streams.get(subject.name).epoch}, the store has no newer"
        )
    ]


Check = Callable[[StreamSubject], list[Finding]]
CATALOG_CHECKS: Mapping[str, Check] = {
    "run": check_run,
    "leases": check_leases,
    "proofs": check_proofs,
    "materialization": check_materialization,
    "outputs": check_outputs,
    "deletions": check_deletions,
}
"""checks that need only the catalog"""
STORE_CHECKS: Mapping[str, Check] = {"manifest": check_manifest, "epochs": check_epochs}
"""checks that need the store, too"""


def _is_running(subject: StreamSubject) -> bool:
    """Whether a run is at work, as far as can be seen from here."""
    runs = subject.warehouse.catalog.runs.list(subject.name)
    return bool(runs) and runs[-1].ended_at is None and not is_known_gone(runs[-1].who)


def _iso(time: datetime) -> str:
    return time.isoformat(timespec="seconds")
