"""Table files on this machine, of a subtask's newest checkpoints in form `files`.

    <state>/files/<id>/          hard links to the table files of one checkpoint, and RocksDB's manifest
       '- stored.json            the objects that they were stored as

So the next checkpoint stores only files that are new, and a restore fetches only those that are not here. A directory
without `stored.json` is not complete, and is not used.
"""

import json
import shutil
import uuid
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from siltstone.model import StoredObject
from siltstone.store.files import link_or_copy
from siltstone.store.private import private_mode, replace_file

STORED = "stored.json"


@dataclass(frozen=True)
class LocalSet:
    """The files of one checkpoint: the object that makes them a database, and name -> object of each."""

    directory: Path
    index: StoredObject
    objects: Mapping[str, StoredObject]


class LocalFiles:
    """The sets below a directory that only the caller uses."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.sets: list[LocalSet] = []
        with suppress(OSError):
            self.sets = [found for path in sorted(directory.iterdir()) if (found := _read(path)) is not None]

    def of(self, index: str | None) -> LocalSet | None:
        """Return the set of the `.files` object with this name, if it is here."""
        return next((each for each in self.sets if each.index.name == index), None)

    def has_manifest(self, index: str, manifest: tuple[str, bytes]) -> bool:
        """Return whether the set of the `.files` object with this name is here, with this manifest (name and bytes)."""
        found, (name, data) = self.of(index), manifest
        with suppress(OSError):
            return found is not None and (found.directory / name).read_bytes() == data
        return False

    def path_of(self, name: str) -> Path | None:
        """Return where the contents of an object are, if they are here; they may be damaged."""
        found = (each.directory / file for each in self.sets for file, o in each.objects.items() if o.name == name)
        return next(found, None)

    def begin(self, id: str, kept: Collection[str]) -> Path:
        """Return the directory of a new set, not made yet, and remove all sets but those of `kept` indexes."""
        kept_names = {each.directory.name for each in self.sets if each.index.name in kept}
        self._directory.mkdir(private_mode(of_directory=True), exist_ok=True)
        for path in self._directory.iterdir():
            if path.name not in kept_names:
                shutil.rmtree(path, ignore_errors=True)
        self.sets = [each for each in self.sets if each.directory.name in kept_names]
        return self._directory / id

    def keep(self, directory: Path, index: StoredObject, objects: Mapping[str, StoredObject]) -> None:
        """Keep the files of another directory as the only set, by links."""
        own = self.begin(uuid.uuid4().hex, ())
        shutil.copytree(directory, own, copy_function=link_or_copy)
        self.add(LocalSet(own, index, objects))

    def add(self, found: LocalSet) -> None:
        """Add a set whose objects are stored."""
        plain = {"index": asdict(found.index), "objects": {name: asdict(o) for name, o in found.objects.items()}}
        replace_file(found.directory / STORED, json.dumps(plain).encode())
        self.sets.append(found)


def _read(directory: Path) -> LocalSet | None:
    try:
        plain = json.loads((directory / STORED).read_text())
        objects = {name: StoredObject(**stored) for name, stored in plain["objects"].items()}
        return LocalSet(directory, StoredObject(**plain["index"]), objects)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
