"""Working state in memory-mapped hash tables: the default backend."""

from siltstone.state.backends.heap.subtask import HeapBackend, HeapState
from siltstone.state.backends.heap.table import HeapTable

__all__ = ["HeapBackend", "HeapState", "HeapTable"]
