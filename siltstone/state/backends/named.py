"""The working-state backends by name."""

from siltstone.errors import UsageError
from siltstone.state.backend import Backend
from siltstone.state.backends.heap import HeapBackend

BACKENDS = ("heap",)


def backend(name: str) -> Backend:
    """The backend of that name.

    Raises:
        UsageError: there is none.
    """
    if name == "heap":
        return HeapBackend()
    raise UsageError(f"there is no state backend {name!r}: use one of {', '.join(BACKENDS)}")
