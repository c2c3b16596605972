"""Examine a warehouse, its catalog and its streams, and report what is wrong and what to do.

Nothing is changed: no lease is taken, no run is fenced, no catalog is upgraded, no identity is written. Each check uses
the engine's own checks; a store or catalog that does not answer is a finding like any other.

    findings   findings, and running a check
    checks     checks of the warehouse as a whole, then of each stream
"""

from functools import partial

from siltstone.catalog.open import NoCatalog, open_catalog
from siltstone.catalog.repository import Catalog
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.doctor import checks
from siltstone.doctor.checks import CATALOG_CHECKS, STORE_CHECKS, StreamSubject
from siltstone.doctor.findings import Examination, Finding
from siltstone.settings import Settings
from siltstone.store.open import Warehouse

LIMIT_S = 15.0
"""default seconds that a check may take"""
_CONNECT_S = 5.0


def examine(settings: Settings, stream: str | None = None, limit_s: float = LIMIT_S) -> list[Finding]:
    """Run every check, of all streams or of one.

    Args:
        limit_s: seconds for each check. A store or catalog that takes longer is not asked again.

    Returns:
        Findings about the warehouse first, then about each stream, by name.

    Raises:
        UnknownStream: the catalog does not know `stream`.
        UsageError: the warehouse's URL is not valid.
    """
    warehouse = Warehouse.at(settings.warehouse)
    url = settings.catalog or warehouse.catalog_url
    done = Examination(limit_s)
    opened: list[Catalog] = []
    lost: list[str] = []
    names: list[str] = []

    def check_catalog() -> list[Finding]:
        try:
            catalog = open_catalog(url, create=False, timeout_s=_CONNECT_S, outage_s=0)
        except NoCatalog:
            lost.append(url)
            raise
        opened.append(catalog)
        names.extend(
            [catalog.streams.get(stream).name] if stream else [record.name for record in catalog.streams.list()]
        )
        return checks.check_catalog(catalog)

    try:
        readable = done.make("catalog", check_catalog, uses=["catalog"])
        catalog = opened[0] if readable else None
        if catalog is not None:
            done.make("clock", partial(checks.check_clock, catalog), uses=["catalog"])
        trusted = done.make("store", partial(checks.check_store, warehouse), uses=["store"])
        if catalog is not None and trusted:
            check = partial(checks.check_identity, warehouse, catalog)
            trusted = done.make("identity", check, uses=["store", "catalog"])
        if lost and trusted:
            done.make("identity", partial(checks.check_lost_catalog, warehouse), uses=["store"])
        done.make("permissions", partial(checks.check_permissions, warehouse, url))
        done.make("space", partial(checks.check_space, warehouse))
        done.make("versions", checks.check_versions)
        done.make("java", partial(checks.check_java, settings.master))
        if catalog is not None:
            found = OpenWarehouse(warehouse, catalog)
            _examine_streams(done, [StreamSubject(found, settings, name) for name in names], trusted)
    finally:
        for catalog in opened:
            catalog.close()
    return done.findings


def _examine_streams(done: Examination, subjects: list[StreamSubject], trusted: bool) -> None:
    """Check each stream, and its objects if the store is `trusted` to be the right one.

    Objects missing from another warehouse's store are not damage.
    """
    for subject in subjects:
        for name, check in CATALOG_CHECKS.items():
            done.make(name, partial(check, subject), uses=["catalog"], stream=subject.name)
        for name, check in STORE_CHECKS.items() if trusted else ():
            done.make(name, partial(check, subject), uses=["store", "catalog"], stream=subject.name)
