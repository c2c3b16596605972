"""Store a subtask's tables as files of RocksDB. Only files that are new since its last checkpoint are stored; the
others are referred to again, as in Flink's incremental checkpoints.

Only files that the checkpoint before names may be referred to again (`CheckpointOrder.files`): whatever else was stored
may be deleted by a sweep. That checkpoint is complete, or it is pending and this one cannot complete without it. Names
of objects are new for each attempt, so an attempt never refers to what another one stored.
"""

import uuid
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from siltstone.changelog.uploader import Uploader
from siltstone.errors import SiltstoneError, StateError, UsageError
from siltstone.format.files import FilesIndex, TableFile, TableRows, encode_files
from siltstone.model import Form, Handle, KeyGroupRange, Kind, StoredObject
from siltstone.restore.local_files import LocalFiles, LocalSet
from siltstone.run.changed import unchanged_tables
from siltstone.run.phase_timer import PhaseTimer
from siltstone.run.task import StepTask
from siltstone.state.backend import LOCAL_SETS, RowFilesState, SubtaskState

UPLOADS = 4
"""files stored at once"""


@dataclass(frozen=True)
class StoredFiles:
    """The handles of all files of a subtask's tables, and the objects that were stored for them now."""

    handles: Sequence[Handle]
    objects: Sequence[StoredObject]


def write_files(
    task: StepTask,
    subtask: int,
    state: SubtaskState,
    clock: PhaseTimer,
    uploader: Uploader,
    changed_before: Collection[str],
) -> StoredFiles:
    """Store the files of all tables as they are in the open step, and forget their changes.

    Args:
        changed_before: the tables that earlier steps of the interval changed.

    Raises:
        UsageError: the working state does not lie in such files.
        Unreachable: the store failed; nothing refers to what was stored.
    """
    if not isinstance(state, RowFilesState) or task.checkpoint is None:
        raise UsageError("checkpoints are files of RocksDB only with `--backend rocksdb`: use another policy")
    local, before = LocalFiles(state.directory / LOCAL_SETS), task.checkpoint.files.get(state.groups)
    last = local.of(before)
    tables = set(state.tables)
    if last is not None and unchanged_tables(task, state, tables, changed_before) == tables:
        return StoredFiles(_handles(task, state, last), ())
    id = uuid.uuid4().hex
    directory = local.begin(id, task.checkpoint.kept_files)
    with clock.phase("base"):
        counts = state.copy_rows(directory)
        again = _same_files(directory, last)
        made = _Upload(task, subtask, uploader, id, directory)
        index = made.store(again, counts, state)
    found = LocalSet(directory, index, made.objects)
    local.add(found)
    for table in state.tables.values():
        table.mark()
    new = [stored for name, stored in made.objects.items() if name not in again]
    return StoredFiles(_handles(task, state, found), [*new, index])


@dataclass
class _Upload:
    task: StepTask
    subtask: int
    uploader: Uploader
    id: str
    directory: Path

    def __post_init__(self) -> None:
        self.objects: dict[str, StoredObject] = {}
        """name in the database -> the object of each file"""

    def store(
        self, again: Mapping[str, StoredObject], counts: Mapping[str, tuple[int, int]], state: SubtaskState
    ) -> StoredObject:
        """Store the files that are not stored, and then what makes all of them a database."""
        from siltstone.state.backends.rocksdb.files import manifest_of, table_files

        names = table_files(self.directory)
        numbers = {name: number for number, name in enumerate(names) if name not in again}
        stored: list[StoredObject] = []
        try:
            with ThreadPoolExecutor(UPLOADS, thread_name_prefix="store-files") as pool:
                for each in [pool.submit(self._put, name, number) for name, number in numbers.items()]:
                    stored.append(each.result())
            self.objects = {**again, **dict(zip(numbers, stored, strict=True))}
            manifest = manifest_of(self.directory)
            index = FilesIndex(
                state.groups,
                state.max_parallelism,
                {name: TableRows(table.schema, *counts[name]) for name, table in state.tables.items()},
                tuple(TableFile(n, self.objects[n].bytes, self.objects[n].checksum) for n in names),
                (manifest.name, manifest.read_bytes()),
            )
            name = self.task.path.files(self.task.operator.name, self.subtask, self.id)
            return self.uploader.put(name, encode_files(index))
        except BaseException:
            with suppress(SiltstoneError):  # a sweep finds what stays
                self.task.warehouse.store.delete([each.name for each in stored])
            raise

    def _put(self, name: str, number: int) -> StoredObject:
        path = self.task.path.row_file(self.task.operator.name, self.subtask, self.id, number)
        try:
            data = (self.directory / name).read_bytes()
        except OSError as error:
            raise StateError(f"cannot read {self.directory / name}: {error.strerror}") from error
        return self.uploader.put(path, data)


def _same_files(directory: Path, last: LocalSet | None) -> dict[str, StoredObject]:
    """Return name -> object of the files of a directory that the last checkpoint has, too: links to the same file."""
    found: dict[str, StoredObject] = {}
    if last is not None:
        for name, stored in last.objects.items():
            with suppress(FileNotFoundError):
                if (directory / name).samefile(last.directory / name):
                    found[name] = stored
    return found


def _handles(task: StepTask, state: SubtaskState, found: LocalSet) -> list[Handle]:
    """Return the handles of each table: of what makes the files a database, with its rows, and of each file."""
    objects = [(found.index, True), *((stored, False) for stored in found.objects.values())]
    return [
        _handle(task, name, state.groups, stored, state.tables[name].rows if is_index else 0)
        for name in sorted(state.tables)
        for stored, is_index in objects
    ]


def _handle(task: StepTask, table: str, groups: KeyGroupRange, stored: StoredObject, rows: int) -> Handle:
    place = stored.name, 0, stored.bytes, stored.checksum, groups
    return Handle(task.operator.name, table, Kind.INCREMENTAL, Form.FILES, *place, rows, 0, task.step)
