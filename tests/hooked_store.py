"""A filesystem store that a test can make slow or make fail, around a put that is otherwise real."""

import threading
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa

from siltstone.errors import Unreachable
from siltstone.model import StoredObject
from siltstone.store.filesystem import FilesystemStore

Hook = Callable[[str], None]


def nothing(_: str) -> None:
    """Let a put pass."""


class HookedStore(FilesystemStore):
    """`before` and `after` are called with the object's name around every put; what they raise, the put raises."""

    def __init__(self, root: Path, *, before: Hook = nothing, after: Hook = nothing, ranged: bool = True) -> None:
        super().__init__(root)
        self.before, self.after = before, after
        self.ranged = ranged
        self.puts: list[str] = []
        self._lock = threading.Lock()

    def put(self, name: str, data: bytes | memoryview | pa.Buffer) -> StoredObject:
        with self._lock:
            self.puts.append(name)
        self.before(name)
        stored = super().put(name, data)
        self.after(name)
        return stored

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.list("")]


class Failing:
    """A hook that fails the next `times` puts, or those whose name ends with `suffix`, or as `decide` says."""

    def __init__(
        self,
        times: int = 1 << 30,
        *,
        suffix: str = "",
        transient: bool = False,
        decide: Callable[[], bool] | None = None,
    ) -> None:
        self.times, self.suffix, self.transient, self.decide = times, suffix, transient, decide

    def __call__(self, name: str) -> None:
        if self.times > 0 and name.endswith(self.suffix) and (self.decide is None or self.decide()):
            self.times -= 1
            raise Unreachable(f"cannot write object {name}: the test says so", transient=self.transient)
