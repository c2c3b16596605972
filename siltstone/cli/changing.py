"""Commands that make of a stream something else: a fork of it."""

from dataclasses import asdict
from typing import Annotated

import typer

from siltstone.cli.application import app
from siltstone.cli.options import AsJson, At, CatalogUrl, StreamName, WarehouseUrl, existing, settings_of
from siltstone.cli.output import print_result, size
from siltstone.model import LATEST


@app.command()
def fork(
    stream: StreamName,
    new: Annotated[str, typer.Argument(metavar="NEW", help="Name of the new stream.")],
    at: At = LATEST,
    warehouse: WarehouseUrl = None,
    catalog: CatalogUrl = None,
    as_json: AsJson = False,
) -> None:
    """Begin a new stream at a checkpoint of another, without copying any object. `siltstone run NEW` goes on there."""
    from siltstone.lifecycle import fork as forking

    with existing(settings_of(warehouse, catalog)) as place:
        done = forking.fork(place.catalog, stream, new, at)
    line = f"{new}: forked from {stream} at checkpoint {done.forked_at}, shares {done.objects} objects, "
    line += f"{size(done.bytes)}, none copied, digest {done.digest}"
    print_result(asdict(done), as_json, line)
