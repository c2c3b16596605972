"""The working-state backends by name."""

from siltstone.errors import UsageError
from siltstone.extras import require_extra
from siltstone.state.backend import Backend
from siltstone.state.backends.heap import HeapBackend

BACKENDS = ("heap", "rocksdb")


def backend(name: str) -> Backend:
    """Return the backend of this name.

    Raises:
        UsageError: no backend has this name, or its package is not installed.
    """
    if name == "heap":
        return HeapBackend()
    if name == "rocksdb":
        with require_extra("rocksdb", "rocksdict", "working state in RocksDB"):
            from siltstone.state.backends.rocksdb import RocksDBBackend

        return RocksDBBackend()
    raise UsageError(f"{name!r} is not a state backend: use one of {', '.join(BACKENDS)}")
