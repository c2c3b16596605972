"""A stream with a full savepoint, to be exported."""

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.materialize import materialize
from siltstone.retention.savepoints import set_savepoint
from tests.orphans import write
from tests.proofs import in_order
from tests.sums import NAME

SAVED = "before-move"
AT = 4


def write_saved(place: OpenWarehouse) -> None:
    """Five checkpoints of the stream of sums, one of them materialized and named."""
    write(place)
    materialize(place, NAME, "by_key", AT, id="m1", parallelism=2, run=in_order)
    set_savepoint(place.catalog, NAME, SAVED, at=str(AT))
