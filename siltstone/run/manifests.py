"""The manifests that a run reads while it goes on; those that its own background makes, without asking the store.

When a materialization is complete, the stream takes over its bases between two steps, also inside an interval. On a
slow store, that should not take a request.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from siltstone.format.manifest import Manifest
from siltstone.format.manifests import read_manifest
from siltstone.model import StoredObject
from siltstone.store.base import Store

_KEPT = 32
"""at most this many are kept: one that a newer base has overtaken is never taken over"""


class RunManifests:
    """Reads manifests of one stream. Any thread may `add`."""

    def __init__(self, stream: str, store: Store) -> None:
        self._stream, self._store = stream, store
        self._made: dict[str, Manifest] = {}
        self._has_news = False

    def add(self, stored: StoredObject, manifest: Manifest) -> None:
        """Keep the manifest of a materialization that this process has completed, until it is taken over."""
        self._made[stored.name] = manifest
        for name in list(self._made)[:-_KEPT]:
            self._made.pop(name, None)
        self._has_news = True

    @contextmanager
    def taking_news(self) -> Iterator[bool]:
        """Yield whether any was added since the last time; if the block fails, it is news again. For one thread."""
        news, self._has_news = self._has_news, False
        try:
            yield news
        except BaseException:
            self._has_news = news or self._has_news
            raise

    def read(self, stored: StoredObject) -> Manifest:
        """Return a manifest; its stream is this one, also if a fork begins with it.

        Raises:
            CorruptObject: it is missing, cut or altered.
            Unreachable: the store does not answer.
        """
        made = self._made.get(stored.name)
        return read_manifest(self._store, stored, self._stream) if made is None else made

    def take_over(self, manifests: Iterable[StoredObject]) -> None:
        """Forget those that are among what a restore reads, as the run knows now."""
        for stored in manifests:
            self._made.pop(stored.name, None)
