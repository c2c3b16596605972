"""A warehouse that is kept as Siltstone wrote it, of checkpoints as files of RocksDB."""

import tempfile
from pathlib import Path

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.change.fork import fork
from siltstone.retention.deletion import delete_checkpoints
from tests.files_cases import rows, run_of
from tests.golden_warehouse import contents, pack
from tests.sums import NAME

FORK = "forked"
KEYS = 60
STEPS = 12


def write(place: OpenWarehouse) -> None:
    """Runs whose checkpoints share files that compaction replaces, another parallelism, a fork, a deletion."""
    for first, parallelism in ((1, 2), (11, 1)):
        run = run_of(place, parallelism)
        for n in range(first, min(first + 10, STEPS + 1)):
            run.step(rows(n, KEYS, 5))
        run.region.close("done")
    fork(place, NAME, FORK, "9")
    delete_checkpoints(place, NAME, [*range(1, 9), 11])


def write_archive(path: Path) -> None:
    """Write an archive."""
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        with OpenWarehouse.open_writable(str(root / "warehouse")) as place:
            write(place)
            expected = contents(place, (NAME, FORK))
        pack(path, root, expected, ("warehouse",))
