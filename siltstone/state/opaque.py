"""A bound opaque variable: the type of `state.<variable>` for an `OpaqueState` inside `Operator.process`."""

from collections.abc import Callable, Iterator
from typing import Any

from siltstone.errors import UsageError
from siltstone.state.backend import SubtaskState


class OpaqueAccess:
    """One object per key group, made by `create` if it does not exist; `flush` saves those that changed."""

    def __init__(
        self,
        name: str,
        state: SubtaskState,
        create: Callable[[], Any],
        serialize: Callable[[Any], bytes],
        deserialize: Callable[[bytes], Any],
    ) -> None:
        self._name, self._state = name, state
        self._create, self._serialize, self._deserialize = create, serialize, deserialize
        self._live: dict[int, Any] = {}

    def __getitem__(self, key_group: int) -> Any:
        """Return the object of a key group; changes to it are saved at the end of the step.

        Raises:
            UsageError: the key group belongs to another subtask.
        """
        group = self._own(key_group)
        if group not in self._live:
            stored = self._state.opaque[self._name].get(group)
            self._live[group] = self._create() if stored is None else self._deserialize(stored)
        return self._live[group]

    def __setitem__(self, key_group: int, value: Any) -> None:
        """Replace the object of a key group."""
        self._live[self._own(key_group)] = value

    def __contains__(self, key_group: int) -> bool:
        return key_group in self._live or key_group in self._state.opaque[self._name]

    def __iter__(self) -> Iterator[int]:
        """Iterate over the key groups that have an object, ascending."""
        return iter(sorted(self._live.keys() | self._state.opaque[self._name].keys()))

    def __len__(self) -> int:
        return len(self._live.keys() | self._state.opaque[self._name].keys())

    def flush(self) -> None:
        """Serialize the objects that were accessed and save those whose bytes changed.

        Raises:
            UsageError: `serialize` did not return bytes.
        """
        stored, changed = self._state.opaque[self._name], {}
        for group, value in sorted(self._live.items()):
            data = self._serialize(value)
            if not isinstance(data, bytes):
                raise UsageError(f"{self._name}: serialize returned {type(data).__name__}: it must return bytes")
            if stored.get(group) != data:
                changed[group] = data
        if changed:
            self._state.set_opaque(self._name, changed)

    def _own(self, key_group: int) -> int:
        group = int(key_group)
        if group not in self._state.groups:
            owned = self._state.groups
            raise UsageError(
                f"{self._name}: key group {group} is not of this subtask, which has {owned.start} to {owned.end - 1}"
            )
        return group
