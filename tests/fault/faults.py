"""What may be wrong with a store while a command works: the network in between, its answers, its disk."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from random import Random
from typing import Any

from siltstone.catalog.warehouse import OpenWarehouse
from tests.fault.disk import Disk
from tests.proxy import LOST_ANSWER, LOST_REQUEST, Fault, Proxy, http, resp

PATIENCE = "wait_s=0.005&attempts=4&timeout_s=2"
UPLOAD_PATIENCE = {"SILTSTONE_UPLOAD__CHECKPOINT_TIMEOUT_S": "5"}
SERVER = re.compile(r"127\.0\.0\.1:(\d+)")


@dataclass
class Faults:
    """Some faults of a kind.

    Attributes:
        name: what people are told.
        network: share of the requests that meet each.
        gone_after: so many requests the server answers, and no more.
        orders: further orders for the victims.
        free_bytes: what is left on the disk.
    """

    name: str
    chance: Random
    network: dict[Fault, float] = field(default_factory=dict)
    gone_after: int | None = None
    orders: dict[str, Any] = field(default_factory=dict)
    disk: Disk | None = None
    free_bytes: int = 0

    @contextmanager
    def happening(self, url: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """While the block runs: the URL and further orders of who is to meet them."""
        if self.disk is not None:
            self.disk.fill(self.free_bytes)
            try:
                yield url, self.orders
            finally:
                self.disk.clear()
            return
        server = SERVER.search(url)
        if not server:
            yield url, self.orders
            return
        proxy = _proxy(int(server[1]))
        proxy.clear()
        proxy.sometimes(self.chance, self.network)
        if self.gone_after is not None:
            proxy.down_after(self.gone_after)
        try:
            orders = self.orders | {"environment": UPLOAD_PATIENCE}
            yield f"{SERVER.sub(f'127.0.0.1:{proxy.port}', url)}&{PATIENCE}", orders
        finally:
            proxy.clear()


@cache
def _proxy(port: int) -> Proxy:
    return Proxy(port)


def faults_of(store: str, disk: Disk, chance: Random) -> Faults:
    """Faults at random of those that a store of this kind can have."""
    seed = {"seed": chance.randrange(1 << 30)}
    kinds = ["full", "cramped"] if disk.mounted else ["cramped"]
    if store == "filesystem":
        kinds.append("broken disk")
    if store in ("s3", "redis"):
        kinds = ["lag", "cuts", "refusals", "wrong bytes", "gone"] * 2 + kinds
    kind = chance.choice(kinds)
    busy = http(503, "SlowDown") if store == "s3" else resp("LOADING Redis is loading the dataset in memory")
    match kind:
        case "full":
            return Faults(kind, chance, disk=disk, free_bytes=chance.randrange(0, 4 << 20))
        case "cramped":
            return Faults(kind, chance, orders={"file_bytes": chance.choice([1 << 10, 1 << 14, 1 << 16, 1 << 18])})
        case "broken disk":
            return Faults(kind, chance, orders=seed | {"refused": chance.choice([0.01, 0.05, 0.3])})
        case "lag":
            return Faults(kind, chance, {Fault(delay_s=0.05): 0.3, Fault(piece_bytes=500, pause_s=0.002): 0.1})
        case "cuts":
            cuts = dict.fromkeys([LOST_REQUEST, LOST_ANSWER, Fault(answer_bytes=100), Fault(request_bytes=150)], 0.03)
            return Faults(kind, chance, cuts)
        case "refusals":
            return Faults(kind, chance, {busy: chance.choice([0.05, 0.3])})
        case "wrong bytes":
            return Faults(kind, chance, {Fault(flips=True): chance.choice([0.1, 1.0])})
        case _:
            return Faults(kind, chance, gone_after=chance.randrange(40))


def damage(place: OpenWarehouse, stream: str, chance: Random) -> str:
    """Alter an object that a restore of the newest checkpoint needs, or lose its manifest; says which."""
    catalog, store = place.catalog, place.warehouse.store
    newest = catalog.checkpoints.last_id(stream)
    manifest = catalog.checkpoints.get(stream, newest).manifest
    needed = [stored.name for stored in catalog.chains.list_objects(stream, newest) if stored.bytes]
    name = chance.choice([manifest.name, *needed])
    size = dict(store.list(name))[name]
    data = bytearray(store.read_range(name, 0, size).to_pybytes())
    store.delete([name])
    if name == manifest.name and chance.random() < 0.5:
        return f"without {name}"
    data[chance.randrange(size)] ^= 1 << chance.randrange(8)
    store.put(name, bytes(data))
    return f"{name} altered"
