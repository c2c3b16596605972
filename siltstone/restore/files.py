"""Read tables that a checkpoint has as files: fetch what is not on this machine, verify, open, scan.

Each file, a local one included, is verified by its handle's checksum before RocksDB sees a byte of it. The digests of
the rows are then compared as always. RocksDB decodes the files, and someone who can write both store and catalog can
craft them. So a process of its own opens them, and what it reads is checked (docs/adr/0058).
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Self

import pyarrow as pa

from siltstone.decoding import translate_decode_errors
from siltstone.errors import CorruptObject, Unreachable
from siltstone.extras import require_extra
from siltstone.format.files import FilesIndex, TableFile, decode_files
from siltstone.model import Form, Handle, KeyGroupRange, StoredObject
from siltstone.restore.local_files import LocalFiles
from siltstone.restore.merge import Batch
from siltstone.restore.plan_rules import Read
from siltstone.state.schema import TableSchema
from siltstone.store.blocks import BlockReader
from siltstone.store.checksums import verify
from siltstone.store.files import link_or_copy
from siltstone.store.paths import is_files_index
from siltstone.store.private import private_mode, write_private_file
from siltstone.store.scratch import SCRATCH, hold_directory, remove_abandoned

if TYPE_CHECKING:
    from siltstone.state.backends.rocksdb.files import RowFiles

FETCHES = 4
"""files fetched at once"""


def file_sets(reads: Sequence[Read]) -> dict[tuple[int, KeyGroupRange], list[Read]]:
    """Return (checkpoint, key groups of the writer) -> the reads of its files, which are opened together."""
    found: dict[tuple[int, KeyGroupRange], list[Read]] = {}
    for read in reads:
        if read.handle.form is Form.FILES:
            found.setdefault((read.checkpoint, read.handle.key_groups), []).append(read)
    return found


def stored_object(handle: Handle) -> StoredObject:
    """Return the object of a file, which its handle covers whole."""
    return StoredObject(handle.object, handle.length, handle.checksum)


class FileSets:
    """Files of several subtasks and checkpoints, each opened once, until the `with` block ends.

    Args:
        local: files that are on this machine already.
        trusted: the checksums of `.files` objects that machines of this run stored.
    """

    def __init__(self, reader: BlockReader, local: LocalFiles | None = None, trusted: Collection[str] = ()) -> None:
        self._reader, self._local, self._trusted = reader, local, trusted
        self._stack = ExitStack()
        self._open: dict[str, OpenFiles] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.clear()
        self._stack.close()

    def open(self, handles: Sequence[Handle]) -> "OpenFiles":
        """Return the files of one subtask at one checkpoint.

        Args:
            handles: all handles of one table or of several.

        Raises:
            CorruptObject: one of them is missing, cut or altered, or RocksDB's own list of files is not among them.
            Unreachable: the store does not answer, or the scratch directory cannot be written.
        """
        index = next((h for h in handles if is_files_index(h.object)), None)
        if index is None:
            raise CorruptObject(f"files of {handles[0].operator}, such as {handles[0].object}, have no index")
        if index.object not in self._open:
            is_own = index.checksum in self._trusted
            opened = OpenFiles(self._reader, index, handles, self._local, is_own)
            self._open[index.object] = self._stack.enter_context(opened)
        return self._open[index.object]


class OpenFiles:
    """The files of one subtask at one checkpoint, fetched and verified; a context manager.

    Attributes:
        directory: the database that they make up; read-only.
        index: what their `.files` object says.
        is_own: whether this run, or this machine, wrote all bytes of them.
    """

    def __init__(
        self,
        reader: BlockReader,
        index: Handle,
        handles: Sequence[Handle],
        local: LocalFiles | None,
        is_own: bool,
    ) -> None:
        self.handle, self.index = index, _read_index(reader, index)
        self.objects = _match(self.index, index, handles)
        self._reader, self._local = reader, local
        self._stack = ExitStack()
        self._rows: RowFiles | None = None
        self.is_own, self._is_here = is_own, local is not None and local.has_manifest(index.object, self.index.manifest)

    def __enter__(self) -> Self:
        try:
            self._fetch_all()
        except OSError as error:
            self._stack.close()
            raise Unreachable(f"cannot keep files of {self.handle.operator}: {error}; free some space") from error
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _fetch_all(self) -> None:
        from siltstone.state.backends.rocksdb.files import write_manifest

        remove_abandoned(self._reader.scratch, SCRATCH)
        held = self._stack.enter_context(hold_directory(self._reader.scratch, SCRATCH))
        self.directory = held.absolute() / "files"
        self.directory.mkdir(private_mode(of_directory=True))
        if not (self.is_own or self._is_here):
            self._row_files()  # the process starts while files are fetched
        with ThreadPoolExecutor(FETCHES, thread_name_prefix="fetch-files") as pool:
            are_here = list(pool.map(self._fetch, self.objects.items()))
        self.is_own |= self._is_here and all(are_here)
        write_manifest(self.directory, *self.index.manifest)

    def _fetch(self, item: tuple[str, StoredObject]) -> bool:
        """Put one file into the directory, by a link, if it is on this machine and intact; return whether it is."""
        name, wanted = item
        here = self._local.path_of(wanted.name) if self._local else None
        if here is not None and _is_intact(here, wanted):
            link_or_copy(here, self.directory / name)
            return True
        self._reader.count(wanted.bytes)
        write_private_file(self.directory / name, memoryview(self._reader.store.read(wanted)))
        return False

    def _row_files(self) -> "RowFiles":
        if self._rows is None:
            from siltstone.state.backends.rocksdb.files import RowFiles

            schemas = {table: of.schema for table, of in self.index.tables.items()}
            size = sum(stored.bytes for stored in self.objects.values())
            self._rows = RowFiles(self.directory, schemas, size)
            self._stack.callback(self._rows.close)
        return self._rows

    def rows(self, name: str, schema: TableSchema, groups: KeyGroupRange) -> Iterator[Batch]:
        """Yield a table's rows of some key groups, in bounded batches by key group.

        Args:
            schema: with the columns that are wanted; those that the files do not have are null.

        Raises:
            CorruptObject: RocksDB cannot read the files, or they are of another table.
        """
        with self._translate_errors():
            for rows, owners in self._row_files().scan(name, groups):
                yield _fit(rows, schema, f"object {self.handle.object}: table {name}"), owners

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Name the objects in RocksDB's errors, which name its own files."""
        with translate_decode_errors(f"object {self.handle.object}", "files of RocksDB"):
            try:
                yield
            except ValueError as error:
                said = str(error).replace(f"{self.directory}/", "")
                for name, stored in self.objects.items():
                    said = said.replace(name, stored.name)
                raise ValueError(said) from error


def _read_index(reader: BlockReader, handle: Handle) -> FilesIndex:
    with require_extra("rocksdb", "rocksdict", "reading files of RocksDB"):
        import_module("rocksdict")  # now, for one clear error
    reader.count(handle.length)
    index = decode_files(reader.store.read(stored_object(handle)), handle.object)
    if index.key_groups != handle.key_groups:
        raise CorruptObject(f"object {handle.object} is of other key groups than its handle says")
    return index


def _match(index: FilesIndex, of: Handle, handles: Sequence[Handle]) -> dict[str, StoredObject]:
    """Return name in the database -> object of each file: the handle with the file's checksum."""
    by_checksum = {(h.checksum, h.length): stored_object(h) for h in handles if h.object != of.object}

    def find(file: TableFile) -> StoredObject:
        found = by_checksum.get((file.checksum, file.bytes))
        if found is None:
            raise CorruptObject(f"object {of.object} has a file {file.name} that no handle of {of.variable} has")
        return found

    return {file.name: find(file) for file in index.files}


def _is_intact(path: Path, wanted: StoredObject) -> bool:
    try:
        if path.stat().st_size != wanted.bytes:
            return False
        verify(path.read_bytes(), wanted.checksum, f"{path}")
    except (OSError, CorruptObject):
        return False
    return True


def _fit(rows: pa.Table, schema: TableSchema, what: str) -> pa.Table:
    """Return the columns of a schema: a value column that an older definition did not have is null, and one that was
    narrow there is wider."""
    columns = []
    for field in schema.rows:
        at = rows.schema.get_field_index(field.name)
        if at < 0 and field.name not in schema.value.names:
            raise CorruptObject(f"{what} has no column {field.name}")
        column = pa.nulls(len(rows), field.type) if at < 0 else rows.column(at)
        if not schema.reads(field, column.type):
            raise CorruptObject(f"{what} has {column.type} as {field.name}, where {field.type} is recorded")
        columns.append(column.cast(field.type))
    return pa.table(columns, schema=schema.rows)


def table_counts(index: FilesIndex) -> Mapping[str, tuple[int, int]]:
    """Return table -> its rows and interval (`RowFilesState.adopt_rows`)."""
    return {name: (of.rows, of.interval) for name, of in index.tables.items()}


def is_all_of(index: FilesIndex, schemas: Mapping[str, TableSchema], groups: KeyGroupRange, most: int) -> bool:
    """Whether files are exactly the rows of a state with these tables and key groups, so that it can adopt them."""
    own = {name: of.schema.to_json() for name, of in index.tables.items()}
    wanted = {name: schema.to_json() for name, schema in schemas.items()}
    return own == wanted and index.key_groups == groups and index.max_parallelism == most
