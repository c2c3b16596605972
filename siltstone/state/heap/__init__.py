"""Working state in memory-mapped hash tables: the default backend."""

from siltstone.state.heap.subtask import HeapBackend, HeapState
from siltstone.state.heap.table import HeapTable

__all__ = ["HeapBackend", "HeapState", "HeapTable"]
