"""What sinks do not have yet when a catalog is lost reaches them from the new catalog, whatever kind each sink is."""

from collections.abc import Callable, Iterator, Set
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from siltstone.catalog.backup import back_up, bring_back
from siltstone.catalog.records.outbox import OutputRecord
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.change.rebuild import rebuild_catalog
from siltstone.run.outbox import damaged_output
from siltstone.sinks.delta import SinkTable
from siltstone.spark.delivery import deliverers
from siltstone.stream import DEAD_LETTERS
from tests.delta_run import TABLES, TableRun, rows_in, sink_table
from tests.outbox_run import NAME, SINK, Heard, Outboxed, batch, inputs, outstanding
from tests.places import place_at
from tests.rebuild_cases import catalog_url
from tests.unit.test_dead_letters import PUTS_ASIDE, dirty, expected, good, told


class MixedRun(Outboxed):
    """One run of a stream, some of whose sinks are tables, and which delivers to each as the stream's runner does."""

    def give(self, output: OutputRecord) -> None:
        if output.name in self.region.outbox.tables:
            SinkTable(self.region.warehouse.store, output.stream, output.name).deliver(output)
        else:
            super().give(output)


def rebuild(place: OpenWarehouse, url: str) -> None:
    rebuild_catalog(place.warehouse, url)


def restore_a_backup(place: OpenWarehouse, url: str) -> None:
    file = Path(place.warehouse.local.objects).parent / "kept.backup"
    back_up(place.catalog.url, file, file.parent)
    bring_back(file, url)


SINKS: dict[str, tuple[Set[str], int]] = {
    "tables": (TABLES, 0),
    "tables, two pending": (TABLES, 2),
    "table": ({SINK}, 0),
    "table, one pending": ({SINK}, 1),
    "table of dead letters": ({DEAD_LETTERS}, 0),
    "functions": (set(), 0),
}
"""which of the sinks are tables, and how many checkpoints may be pending"""


def cases() -> Iterator[Any]:
    """Each of `SINKS` from a catalog that was rebuilt; from a backup, which has the same outputs, two of them."""
    for (name, sinks), replace_catalog in product(SINKS.items(), (rebuild, restore_a_backup)):
        often = replace_catalog is rebuild or name in {"tables, two pending", "functions"}
        marks = [] if often else [pytest.mark.thorough]
        yield pytest.param(*sinks, replace_catalog, marks=marks, id=f"{name}-{replace_catalog.__name__}")


@pytest.mark.parametrize(("tables", "max_pending", "replace_catalog"), list(cases()))
def test_what_is_outstanding_reaches_its_sinks_from_another_catalog(
    tmp_path: Path, replace_catalog: Callable[[OpenWarehouse, str], None], tables: frozenset[str], max_pending: int
) -> None:
    """The case `delta_rebuild`, in which the run was killed before its first delivery, and there is no table yet."""
    options = {"stream": PUTS_ASIDE, "tables": frozenset(tables), "max_pending": max_pending}
    with place_at(tmp_path / "w") as place:
        killed = MixedRun(place, Heard(), delivers=False, **options)
        for n in (1, 2, 3):
            killed.step(dirty(n))
        killed.complete_pending()
        known = place.catalog.outbox.list(NAME)
        replace_catalog(place, catalog_url(tmp_path))
    heard, letters = Heard(), Heard()
    with OpenWarehouse.open_writable(str(tmp_path / "w"), catalog_url(tmp_path)) as again:
        assert again.catalog.outbox.list(NAME) == known and outstanding(again) == [1, 1, 2, 2, 3, 3]
        assert damaged_output(again.warehouse.store, again.catalog, NAME) is None, "so that `recover` finds nothing"
        run = MixedRun(again, heard, letters=letters, **options)
        run.step(dirty(4))
        run.complete_pending()
        run.deliver()
        assert outstanding(again) == []
        wanted, reasons = sorted(n for id in range(1, 5) for n in good(id)), [expected(n) for n in range(1, 5)]
        assert (rows_in(again) if SINK in tables else heard.inputs) == wanted
        if DEAD_LETTERS in tables:
            assert rows_in(again, sink=DEAD_LETTERS, column="reason") == sorted(
                reason for each in reasons for reason, _ in each
            )
        else:
            assert told(letters) == [(id, each) for id, each in enumerate(reasons, 1)]


def test_rows_staged_as_files_reach_their_table_though_the_sink_is_a_function_since(tmp_path: Path) -> None:
    """The definition changed while the rows were outstanding, and the catalog was lost, too."""
    with place_at(tmp_path / "w") as place:
        TableRun(place, delivers=False).step(batch(1))
        rebuild(place, catalog_url(tmp_path))
    with OpenWarehouse.open_writable(str(tmp_path / "w"), catalog_url(tmp_path)) as again:
        [output] = again.catalog.outbox.list(NAME)
        sinks: Any = deliverers(None, {SINK: pytest.fail}, again.warehouse.store_url)  # type: ignore[arg-type]
        sinks[SINK](output)
        assert rows_in(again) == inputs([1])
        size = sink_table(again).describe()
        assert (size.rows, size.files) == (10, 1), "and the table's log has what it says of the file"
