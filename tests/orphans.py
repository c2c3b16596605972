"""A small stream in a warehouse of any kind, and orphans of every class beside its objects."""

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.store.paths import CheckpointPath
from tests.proofs import failures
from tests.redis_server import shared_server
from tests.region_run import RegionRun
from tests.servers import moto
from tests.store_cases_s3 import fresh_bucket
from tests.sums import NAME, POLICY, STREAM, rows


def new_run(place: OpenWarehouse) -> RegionRun:
    """Take the stream over."""
    return RegionRun(place, STREAM, POLICY, parallelism=2)


def filesystem(tmp_path: Path) -> OpenWarehouse:
    return OpenWarehouse.open_writable(str(tmp_path / "w"))


def rocksdb(tmp_path: Path) -> OpenWarehouse:
    return OpenWarehouse.open_writable(f"rocksdb://{tmp_path}/w")


def redis(tmp_path: Path) -> OpenWarehouse:
    url = shared_server().url(f"prefix={uuid.uuid4().hex}&local={tmp_path}/w")
    return OpenWarehouse.open_writable(url, f"sqlite:///{tmp_path}/catalog.db")


def s3(tmp_path: Path) -> OpenWarehouse:
    server = moto()
    _, bucket = fresh_bucket(server)
    url = f"s3://{bucket}/warehouse?endpoint={server.endpoint}&region=us-east-1&local={tmp_path}/w"
    return OpenWarehouse.open_writable(url, f"sqlite:///{tmp_path}/catalog.db")


PLACES: dict[str, Callable[[Path], OpenWarehouse]] = {
    "filesystem": filesystem,
    "rocksdb": rocksdb,
    "redis": redis,
    "s3": s3,
}


@dataclass(frozen=True)
class Injected:
    """Names of objects that nothing refers to, by what they are."""

    fenced: list[str]
    late: list[str]
    writing: list[str]
    ahead: list[str]
    strange: list[str]
    foreign: list[str]

    @property
    def orphans(self) -> set[str]:
        """Those that a sweep deletes at once."""
        return {*self.fenced, *self.late}

    @property
    def kept(self) -> set[str]:
        """Those of the stream that it does not."""
        return {*self.writing, *self.ahead, *self.strange}


def write(place: OpenWarehouse) -> RegionRun:
    """Checkpoints 1 and 2 by epoch 1, 3 to 5 by epoch 2, which is left running."""
    first = new_run(place)
    for n in (1, 2):
        first.step(rows(n))
    second = new_run(place)
    for n in (3, 4, 5):
        second.step(rows(n))
    return second


def inject(place: OpenWarehouse) -> Injected:
    """Orphans of every class beside what `write` wrote."""

    def path(epoch: int, checkpoint: int) -> CheckpointPath:
        return CheckpointPath(NAME, epoch, checkpoint)

    injected = Injected(
        fenced=[
            path(1, 1).segment("lost"),
            path(1, 2).base("by_key", "totals", 0, "lost"),
            path(1, 3).segment("killed"),
            path(1, 3).base("by_key", "totals", 1, "killed"),
            path(1, 3).manifest(),
            path(1, 40).segment("pending"),
        ],
        late=[
            path(2, 4).base("by_key", "totals", 0, "lost"),
            path(2, 5).segment("hedged", "NON"),
            path(2, 5).snapshot("by_key", "totals", 1, "s9-ab"),
            path(2, 2).segment("early"),
            path(2, 4).materialized_base("by_key", "totals", 0, "m1"),
            path(2, 4).materialization("by_key", "m1"),
        ],
        writing=[path(2, 6).segment("now"), path(2, 6).base("by_key", "window.bounds", 0, "now")],
        ahead=[path(3, 6).segment("newer"), path(2, 8).manifest()],
        strange=[f"{NAME}/README", f"{path(1, 1).prefix}notes.txt", f"{NAME}/00000001/manifest.arrow"],
        foreign=["other/00000001/000000000001/lost.segment", f"{NAME}-2/00000001/000000000001/manifest.arrow"],
    )
    for names in vars(injected).values():
        for name in names:
            place.warehouse.store.put(name, name.encode())
    return injected


def stored(place: OpenWarehouse, prefix: str = f"{NAME}/") -> set[str]:
    """Names in the store."""
    return {name for name, _ in place.warehouse.store.list(prefix)}


def referenced(place: OpenWarehouse) -> set[str]:
    """Names that the catalog refers to."""
    return {o.name for o in place.catalog.objects.list(NAME)}


def check_whole(place: OpenWarehouse, *others: str) -> None:
    """All checkpoints prove, and the stream's objects are those referred to and `others`."""
    assert not failures(place, NAME)
    assert stored(place) == referenced(place) | set(others)
