"""One case a kind of store for the contract suite: how to open it, and how to reach behind it to damage an object.

A kind of store adds a module `store_cases_<kind>` with functions `(tmp_path) -> Case`, named in FACTORIES here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from siltstone.store.base import Store
from siltstone.store.open import open_store
from tests import store_cases_kv, store_cases_s3


@dataclass(frozen=True)
class Case:
    """A fresh, empty store. `alter(name, data)` replaces the bytes behind a name; None removes them."""

    url: str
    alter: Callable[[str, bytes | None], None]

    def open(self) -> Store:
        return open_store(self.url)


def filesystem(tmp_path: Path) -> Case:
    root = tmp_path / "warehouse" / "objects"

    def alter(name: str, data: bytes | None) -> None:
        (root / name).unlink()
        if data is not None:
            (root / name).write_bytes(data)

    return Case(root.as_uri(), alter)


FACTORIES: dict[str, Callable[[Path], Case]] = {"filesystem": filesystem} | store_cases_s3.factories()
FACTORIES |= store_cases_kv.factories()
