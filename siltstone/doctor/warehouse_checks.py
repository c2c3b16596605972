"""Checks of `siltstone doctor` that are not about one stream. None of them changes anything."""

import os
import platform
import shlex
import shutil
import time
from datetime import UTC, datetime, timedelta
from importlib import metadata
from pathlib import Path

from siltstone.catalog.engine import parse_url
from siltstone.catalog.identity import inspect_identity
from siltstone.catalog.repository import Catalog
from siltstone.catalog.tables import REVISION
from siltstone.doctor.findings import Finding
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
    url, found = parse_url(catalog_url), [_exposed(warehouse.local.root)]
    path = Path(str(url.database))
    if url.drivername == "sqlite" and _exposed(path.parent):
        found.append(_exposed(path))
    exposed = [each for each in found if each is not None]
    said = f"none on this machine are wider than umask {own_umask():03o} allows"
    return exposed or [Finding("permissions", "ok", said)]


def _exposed(path: Path) -> Finding | None:
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
    """Report the installed versions."""
    versions = [f"{name} {metadata.version(name)}" for name in _PACKAGES]
    return [Finding("versions", "ok", ", ".join([*versions, f"Python {platform.python_version()}"]))]


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
