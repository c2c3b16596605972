"""The check of links follows chains through materializations, also those at checkpoints that are deleted in part."""

from pathlib import Path

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.policies import PolicyOptions, policy_by_name
from siltstone.dagster.checks import facts
from siltstone.retention.retention_rules import RetentionOptions
from siltstone.retention.truncate import truncate
from siltstone.settings import Settings
from tests.region_run import RegionRun
from tests.sums import NAME, rows, stream_of
from tests.unit.test_postponed_bases import Turns, consolidate


def test_a_delta_may_build_on_a_base_that_was_materialized_after_what_it_names(tmp_path: Path) -> None:
    stream = stream_of(Turns(), max_parallelism=16)
    with OpenWarehouse.open_writable(str(tmp_path)) as place:
        run = RegionRun(place, stream, policy_by_name("adjust-d", PolicyOptions(d0=50)))
        for n in range(1, 8):
            run.step(rows(n, keys=500, changed=20))
        assert consolidate(place, 6, "m6") == {"busy", "static"}
        for n in (8, 9):
            run.step(rows(n, keys=500, changed=20))
        # The manifest of checkpoint 6 goes, its materialization stays; the static table's last delta was in 4.
        truncate(place, NAME, RetentionOptions(keep_last=1))
        run.step(rows(2, keys=500, changed=20))
    links = facts.links(facts.Subject(Settings(warehouse=str(tmp_path)), stream))
    newest = links[links.checkpoint == 10]
    assert dict(zip(newest.table, newest.builds_on, strict=True)) == {"busy": 9, "static": 6}
    assert links.whole.all()
