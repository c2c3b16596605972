"""Uploads of simulated processes, each in the process's own thread: it can be stopped before each and killed there.

The engine's uploader sends on threads of its own, which no schedule stops.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest import mock
from weakref import WeakValueDictionary

from siltstone.changelog.upload_metrics import UploadMetrics
from siltstone.model import StoredObject
from tests.simulation.processes import SimulatedStore

_STORES: "WeakValueDictionary[str, SimulatedStore]" = WeakValueDictionary()
_UPLOADING = ("siltstone.run.pending", "siltstone.chains.materialize")
"""modules that look a store's uploader up, and are reached here: of manifests and of bases"""


class SimulatedUploader:
    """Stores objects of their own at once (`siltstone.changelog.uploader.Uploader`)."""

    def __init__(self, store: SimulatedStore) -> None:
        self._store = store
        self.metrics = UploadMetrics()
        self.checksums = store.checksums

    def put(self, name: str, data: Any) -> StoredObject:
        return self._store.put(name, data)

    def create(self, name: str) -> AbstractContextManager[Any]:
        return self._store.create(name)


def name_store(store: SimulatedStore) -> str:
    """Let uploads find the store by its URL, which is returned."""
    store.url = f"memory://{id(store)}"
    _STORES[store.url] = store
    return store.url


def _find(url: str, _: object) -> SimulatedUploader:
    return SimulatedUploader(_STORES[url])


@contextmanager
def simulated_uploads() -> Iterator[None]:
    """Let the engine's uploads to named stores go through them."""
    with ExitStack() as stack:
        for module in _UPLOADING:
            stack.enter_context(mock.patch(f"{module}.uploader_of", _find))
        yield
