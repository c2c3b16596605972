"""A catalog of hand-made checkpoints, for tests of reports."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from siltstone.catalog.open import open_catalog
from siltstone.catalog.records.commits import CheckpointCommit
from siltstone.catalog.repository import Catalog
from siltstone.model import Form, StoredObject
from siltstone.report import ReportData, report_data
from siltstone.report.panels import Page

NOON = datetime(2026, 11, 20, 12, tzinfo=UTC)
MANIFEST = 7
"""bytes of each manifest"""
NO_BOUND: Mapping[str, float] = {}
Part = tuple[str, int]
"""form and bytes"""
CHAIN: list[dict[str, Part]] = [
    {"aircraft": ("base", 1000), "routes": ("base", 500)},
    {"aircraft": ("delta", 100), "routes": ("delta", 40)},
    {"aircraft": ("delta", 200), "routes": ("base", 600)},
    {"aircraft": ("base", 1200), "routes": ("delta", 50)},
    {"aircraft": ("delta", 300), "routes": ("delta", 60)},
]


def add(
    catalog: Catalog,
    parts: Mapping[str, Part],
    epoch: int = 1,
    *,
    bound: Mapping[str, float] = NO_BOUND,
    events: bool = True,
    d: int = 2,
) -> None:
    """Commit the next checkpoint of stream flights, as a region would; each operator has one table."""
    before = catalog.checkpoints.list("flights", 1)
    id = before[-1].id + 1 if before else 1
    chains = before[-1].statistics["operators"] if before else {}
    operators = {
        name: {"bytes": size, "state_rows": 10 * id, "seconds": {form: 0.25}}
        | {"tables": {"all": {"form": form, "bytes": size, "chain": _chain(id, form, size, chains.get(name))}}}
        | ({"restore_bound_bytes": bound[name], "restore_bound_s": bound[name] / 1000} if name in bound else {})
        for name, (form, size) in parts.items()
    }
    catalog.commits.add(
        "flights",
        epoch,
        CheckpointCommit(
            id=id,
            manifest=StoredObject(f"flights/{epoch:08d}/{id:012d}/manifest.a.arrow", MANIFEST, "xxh3-128:" + "0" * 32),
            digest="0" * 32,
            rows=10 * id * len(parts),
            bytes=MANIFEST + sum(size for _, size in parts.values()),
            forms={name: Form(form) for name, (form, _) in parts.items()},
            d=dict.fromkeys(parts, d),
            statistics={"operators": operators},
            event_time_max=datetime(2013, 1, 1, tzinfo=UTC) + timedelta(days=id) if events else None,
        ),
    )


def _chain(id: int, form: str, size: int, before: Mapping[str, Any] | None) -> dict[str, int]:
    """The table's chain after a checkpoint, given what was recorded with the one before."""
    if form == "base" or before is None:
        return {"first": id, "base_bytes": size, "deltas": 0, "deltas_bytes": 0}
    chain = before["tables"]["all"]["chain"]
    return chain | {"deltas": chain["deltas"] + 1, "deltas_bytes": chain["deltas_bytes"] + size}


@contextmanager
def report_catalog(tmp_path: Path) -> Iterator[Catalog]:
    """A catalog that knows stream flights and one run of it; three seconds pass at each look at its clock."""
    times = (NOON + timedelta(seconds=3 * i) for i in range(10**6))
    with open_catalog(f"sqlite:///{tmp_path}/catalog.db", now=lambda: next(times)) as opened:
        opened.streams.register("flights", 128, {})
        opened.runs.begin("flights", "here:1")
        yield opened


def record_chain(catalog: Catalog) -> ReportData:
    """`CHAIN` with bounds, a second run from checkpoint 4 on, a measured restore of 3 and a failed proof of 2."""
    for i, parts in enumerate(CHAIN):
        if i == 3:
            catalog.runs.begin("flights", "here:2")
        add(catalog, parts, 2 if i >= 3 else 1, bound={"aircraft": 2000.0, "routes": 900.0 + i})
    catalog.checkpoints.record_proof("flights", 2, False, "digest differs")
    catalog.checkpoints.record_proof("flights", 3, True, restore_s=1.5, restore_bytes=1900)
    return report_data(catalog, "flights")


def drawn(data: ReportData) -> Figure:
    """The picture, drawn in memory."""
    figure = Page(data).figure()
    FigureCanvasAgg(figure).draw()
    return figure
