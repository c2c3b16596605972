"""The working-state backends by name."""

from siltstone.errors import UsageError
from siltstone.state.backend import Backend
from siltstone.state.backends.heap import HeapBackend

BACKENDS = ("heap",)


def backend(name: str) -> Backend:
    """Return the backend of this name.

    Raises:
        UsageError: no backend has this name.
    """
    if name == "heap":
        return HeapBackend()
    raise UsageError(f"{name!r} is not a state backend: use one of {', '.join(BACKENDS)}")
