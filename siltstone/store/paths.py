"""Every object name and every path on this machine, built in this file and nowhere else.

    <warehouse>/
    |- objects/                                 root of the filesystem store; below it, object names:
    |  |- .tmp/                                     objects still being written; never listed, never read
    |  |- _epochs/<stream>/<epoch:08d>              marks a writer epoch that was begun (`catalog.epochs`)
    |  |- _epochs/<stream>/fork-<fork>              marks a fork, which shares objects
    |  |- _catalog/<stream>/                       what the catalog knows of a stream (`catalog.extracts`)
    |  |  |- <epoch:08d>-<number:012d>                 an extract
    |  |  |- steps-<epoch:08d>-<number:012d>           steps of the input log, written with that extract
    |  |  '- beginning-<hash>                          step 0 of the input log, named by its content
    |  |- _warehouse/identity                       the warehouse's identity, as in the catalog (`store.identity`)
    |  |- _sinks/<stream>/<sink>/                   a Delta table of the stream's output (`siltstone.sinks.delta`)
    |  |  |- _delta_log/                               its log; until a file is there, no reader sees it
    |  |  '- <epoch:08d>/<checkpoint:012d>/<operator>.<subtask:05d>.<attempt>.rows.parquet
    |  '- <stream>/
    |     '- <epoch:08d>/                           writer epoch
    |        '- <checkpoint:012d>/
    |           |- manifest.arrow                                        all that the checkpoint wrote
    |           |- s<step:012d>-<log>.segment                            segments that one uploader stored at once
    |           |- s<step:012d>-<log>.NON  .INCR  .INDEX                 the same in a store with separate sections
    |           |- <operator>.<variable>.<subtask:05d>.<attempt>.base.parquet      a base or materialization
    |           |- <operator>.<variable>.<subtask:05d>.<attempt>.opaque          large values of an opaque variable
    |           |- <operator>.<subtask:05d>.<attempt>-<n>.sst                    a table file of RocksDB, and what
    |           |- <operator>.<subtask:05d>.<attempt>.files                      makes such files a database
    |           |- <operator>.<variable>.<part:05d>.<id>.materialized.parquet     a materialization,
    |           |- <operator>.<variable>.<part:05d>.<id>.materialized.opaque      of an opaque variable, and
    |           |- <operator>.<id>.materialized.arrow                             its manifest
    |           |- <operator>.<subtask:05d>.<attempt>.output.arrow                rows for a sink, until it has them
    |           '- <operator>.<variable>.<subtask:05d>.<attempt>.snapshot.parquet  a full snapshot, for proof
    |- catalog.db                               SQLite catalog (unless another one is named)
    |- catalog-<time>-r<revision>.backup        a backup of a catalog, which is a SQLite catalog, too
    |- work/.scratch/                           files that a process reads; removed once it has ended
    |- work/<stream>/<epoch:08d>/               may vanish at any time
    |  |- state/<operator>/<subtask:05d>/           working state of one subtask
    |  '- spark/                                    Spark's own offset, commit and source logs
    |- source/<stream>/                         what the stream's own source prepared to read
    |- sink/<stream>/                           what the stream's Parquet sinks wrote
    |- restored/<stream>/<checkpoint:012d>/     state restored for others to read, proven, as Parquet
    |- restored/<stream>/series/<label>/        the same for many checkpoints, such as one for each day
    '- dagster/                                 Dagster's home: its runs and events

In a store that is not a local directory the object names are the same, under the store's prefix. A name begins
with stream, epoch and checkpoint, so that an unfinished checkpoint's objects are found without listing everything.
Names are plain ASCII without `..` or a leading `/` or `.`, and paths are joined by `store.directories.path_below`,
which refuses symbolic links, so no path leads outside the warehouse (promise 8).
"""

import re
import tempfile
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Self

from siltstone.errors import UsageError
from siltstone.model import MAX_EPOCH, check_name
from siltstone.store.directories import path_below

TEMPORARY = ".tmp"
"""matches the names that `catalog_backup` makes"""
IDENTITY = "_warehouse/identity"
"""the object with the identity of a store's warehouse; no stream's name begins with an underscore"""
EXPORT = "_savepoint/export"
"""the object that makes an exported savepoint whole, where it was exported to (`change.exported`)"""
_EPOCHS = "_epochs"
_FORK = "fork-"
_SINKS = "_sinks"
_SNAPSHOT = ".snapshot.parquet"
_BASE = ".base.parquet"
_OPAQUE = ".opaque"
_MATERIALIZED = ".materialized.parquet"
_MATERIALIZED_OPAQUE = ".materialized.opaque"
_MATERIALIZATION = ".materialized.arrow"
_OUTPUT = ".output.arrow"
_TABLE_FILE = ".rows.parquet"
_ROW_FILE = ".sst"
_FILES = ".files"
_PART = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,254}")
_LABEL = re.compile(r"[A-Za-z0-9_:-][A-Za-z0-9._:-]{0,99}")
_ATTEMPT = re.compile(r"[A-Za-z0-9_-]{1,64}")
_FILE = re.compile(
    r"manifest\.arrow|[A-Za-z0-9_-]{1,64}\.(segment|NON|INCR|INDEX)"
    r"|[a-z][a-z0-9_-]*(\.[a-z][a-z0-9_-]*){1,2}\.\d{5}\.[A-Za-z0-9_-]{1,64}"
    r"\.((base|snapshot|materialized)\.parquet|(materialized\.)?opaque)"
    r"|[a-z][a-z0-9_-]*\.[A-Za-z0-9_-]{1,64}\.materialized\.arrow"
    r"|[a-z][a-z0-9_-]*(\.[a-z][a-z0-9_-]*)?\.\d{5}\.[A-Za-z0-9_-]{1,64}\.(output\.arrow|rows\.parquet)"
    r"|[a-z][a-z0-9_-]*\.\d{5}\.[A-Za-z0-9_-]{1,64}\.(sst|files)"
)
_RESTORED = re.compile(
    r"(.+?)(\.(?:segment|NON|INCR|INDEX|base\.parquet|materialized\.parquet|(?:materialized\.)?opaque))"
)
_FORK_MARK = re.compile(rf"{_EPOCHS}/[a-z][a-z0-9_-]*/{_FORK}([a-z][a-z0-9_-]*)")
_PLACE = re.compile(r"([a-z][a-z0-9_-]*)/([0-9]{8})/([0-9]{12})/[^/]+")
_TABLE_PLACE = re.compile(rf"{_SINKS}/([a-z][a-z0-9_-]*)/[a-z][a-z0-9_-]*/([0-9]{{8}})/([0-9]{{12}})/[^/]+")


def check_object_name(name: str) -> str:
    """Return `name` if it is `/`-separated parts of letters, digits, `.`, `_` and `-`, without leading dots.

    Raises:
        UsageError: it is not.
    """
    if not is_object_name(name):
        raise UsageError(f"{name!r} is not an object name: use /-separated parts of letters, digits, '.', '_' and '-'")
    return name


def is_object_name(name: str) -> bool:
    """Whether it is a valid object name (`check_object_name`)."""
    return 0 < len(name) <= 1024 and all(_PART.fullmatch(part) for part in name.split("/"))


def check_prefix(prefix: str) -> str:
    """Return `prefix` if an object name can start with it; the empty prefix is valid.

    Raises:
        UsageError: no object name starts with it.
    """
    if prefix:
        check_object_name(prefix.removesuffix("/"))
    return prefix


@dataclass(frozen=True, slots=True)
class CheckpointPath:
    """Object names of one checkpoint, as one writer epoch writes it.

    `attempt` distinguishes the names of two attempts at the same work; the loser's objects become orphans.

    Raises:
        UsageError: a stream, operator or variable name is not valid, or a number is out of range.
    """

    stream: str
    epoch: int
    checkpoint: int

    def __post_init__(self) -> None:
        check_name("stream", self.stream)
        if not (0 <= self.epoch <= MAX_EPOCH and 0 <= self.checkpoint < 10**12):
            raise UsageError(f"epoch {self.epoch} or checkpoint {self.checkpoint} is out of range")

    @property
    def prefix(self) -> str:
        """The prefix of all names of the checkpoint, including the slash."""
        return f"{epoch_prefix(self.stream, self.epoch)}{self.checkpoint:012d}/"

    def manifest(self) -> str:
        """Return the name of the checkpoint's manifest."""
        return f"{self.prefix}manifest.arrow"

    def segment(self, log: str, section: str = "segment") -> str:
        """Return the name of segments stored together, or of one of their sections; `log` is unique per upload."""
        if not _ATTEMPT.fullmatch(log):
            raise UsageError(f"{log!r} cannot name a segment: use letters, digits, _ and -")
        return f"{self.prefix}{log}.{section}"

    def base(self, operator: str, variable: str, subtask: int, attempt: int | str) -> str:
        """Return the name of a base form of one variable."""
        return f"{self.prefix}{_writer(operator, variable, subtask, attempt)}{_BASE}"

    def opaque(self, operator: str, variable: str, subtask: int, attempt: str) -> str:
        """Return the name of values of one opaque variable that have an object of their own."""
        return f"{self.prefix}{_writer(operator, variable, subtask, attempt)}{_OPAQUE}"

    def files(self, operator: str, subtask: int, attempt: str) -> str:
        """Return the name of what makes table files a database of one subtask's rows (`format.files`)."""
        return f"{self.prefix}{_writer(operator, None, subtask, attempt)}{_FILES}"

    def row_file(self, operator: str, subtask: int, attempt: str, number: int) -> str:
        """Return the name of one of its table files. `attempt` is unique among all checkpoints, which may share it."""
        return f"{self.prefix}{_writer(operator, None, subtask, f'{attempt}-{number}')}{_ROW_FILE}"

    def materialized_base(self, operator: str, variable: str, part: int, id: str) -> str:
        """Return the name of a base of one variable, written by the materialization `id`."""
        return f"{self.prefix}{_writer(operator, variable, part, id)}{_MATERIALIZED}"

    def materialized_opaque(self, operator: str, variable: str, part: int, id: str) -> str:
        """Return the name of all values of an opaque variable, written by the materialization `id`."""
        return f"{self.prefix}{_writer(operator, variable, part, id)}{_MATERIALIZED_OPAQUE}"

    def materialization(self, operator: str, id: str) -> str:
        """Return the name of a materialization's manifest."""
        return f"{self.prefix}{check_name('operator', operator)}.{check_attempt(id)}{_MATERIALIZATION}"

    def output(self, output: str, subtask: int, attempt: str) -> str:
        """Return the name of rows staged for a sink; `output` is `OPERATOR` or `OPERATOR.NAME`."""
        operator, *own = output.split(".")
        return f"{self.prefix}{_writer(operator, '.'.join(own) if own else None, subtask, attempt)}{_OUTPUT}"

    def table_file(self, sink: str, output: str, subtask: int, attempt: str) -> str:
        """Return the name of rows staged for the table of a sink, of which they become a part; `output` as above."""
        operator, *own = output.split(".")
        written = _writer(operator, ".".join(own) if own else None, subtask, attempt)
        return f"{sink_table(self.stream, sink)}{self.epoch:08d}/{self.checkpoint:012d}/{written}{_TABLE_FILE}"

    def snapshot(self, operator: str, variable: str, subtask: int, attempt: int | str) -> str:
        """Return the name of a full snapshot of one variable's live state."""
        return f"{self.prefix}{_writer(operator, variable, subtask, attempt)}{_SNAPSHOT}"

    @classmethod
    def of(cls, name: str) -> Self | None:
        """Return the checkpoint that an object name belongs to; None for other names."""
        found = _PLACE.fullmatch(name) or _TABLE_PLACE.fullmatch(name)
        return cls(found[1], int(found[2]), int(found[3])) if found else None


@dataclass(frozen=True, slots=True)
class StepPath(CheckpointPath):
    """Object names of one step's changes: those of the checkpoint that will include them, and the step's number."""

    step: int

    def segment(self, log: str, section: str = "segment") -> str:
        """Return the name of segments of the step stored together, or of one of their sections."""
        return CheckpointPath.segment(self, f"s{self.step:012d}-{log}", section)


def check_attempt(id: str) -> str:
    """Return `id` if it can be the id of an attempt or materialization: letters, digits, `_` and `-`.

    Raises:
        UsageError: it is not.
    """
    if not _ATTEMPT.fullmatch(id):
        raise UsageError(f"{id!r} cannot be part of an object name: use letters, digits, _ and -")
    return id


def check_label(label: str) -> str:
    """Return `label` if it can name a restored checkpoint: letters, digits, `.`, `_`, `:` and `-`, no leading dot.

    Raises:
        UsageError: it is not.
    """
    if not _LABEL.fullmatch(label):
        raise UsageError(f"{label!r} is not a label: use letters, digits, '.', '_', ':' and '-', and no leading dot")
    return label


def is_built_here(name: str) -> bool:
    """Whether it is the name of an object that Siltstone writes."""
    return CheckpointPath.of(name) is not None and _FILE.fullmatch(name.rpartition("/")[2]) is not None


def add_writer(file: str, writer: CheckpointPath) -> str:
    """Return the last part of an object's name with its writer epoch and checkpoint in it, which tell it from others.

    Raises:
        UsageError: it would be too long, or is not that of an object that a restore reads.
    """
    found = _RESTORED.fullmatch(file)
    named = f"{found[1]}-{writer.epoch}-{writer.checkpoint}{found[2]}" if found else ""
    if not _FILE.fullmatch(named):
        raise UsageError(f"{file!r} cannot be told from another object of that name")
    return named


def is_manifest(name: str) -> bool:
    """Whether it is the name of a checkpoint's manifest."""
    path = CheckpointPath.of(name)
    return path is not None and path.manifest() == name


def is_base(name: str) -> bool:
    """Whether it is the name of a base form."""
    return name.endswith(_BASE)


def is_row_file(name: str) -> bool:
    """Whether it is the name of a table file of RocksDB, or of what makes such files a database."""
    return is_built_here(name) and name.endswith((_ROW_FILE, _FILES))


def is_files_index(name: str) -> bool:
    """Whether it is the name of what makes table files a database."""
    return name.endswith(_FILES)


def is_materialization_manifest(name: str) -> bool:
    """Whether it is the name of a materialization's manifest."""
    return name.endswith(_MATERIALIZATION)


def materialization_of(name: str) -> str | None:
    """Return the id of the materialization that wrote an object; None for other objects."""
    for suffix in (_MATERIALIZED, _MATERIALIZED_OPAQUE, _MATERIALIZATION):
        if name.endswith(suffix):
            return name.removesuffix(suffix).rpartition(".")[2]
    return None


def materialized_variable(name: str) -> str:
    """Return the table or opaque variable whose base a materialization wrote under this name."""
    bare = name.rpartition("/")[2].removesuffix(_MATERIALIZED).removesuffix(_MATERIALIZED_OPAQUE)
    _operator, *variable, _part, _id = bare.split(".")
    return ".".join(variable)


def snapshot_of(name: str) -> tuple[str, str]:
    """Return (operator, table) of a snapshot's object."""
    operator, *table, _subtask, _attempt = name.rpartition("/")[2].removesuffix(_SNAPSHOT).split(".")
    return operator, ".".join(table)


def stream_prefix(stream: str) -> str:
    """Return the prefix of all object names of a stream."""
    return f"{check_name('stream', stream)}/"


def sink_tables(stream: str) -> str:
    """Return the prefix of the tables of a stream's sinks, separate from its other objects."""
    return f"{_SINKS}/{check_name('stream', stream)}/"


def sink_table(stream: str, sink: str) -> str:
    """Return the prefix of the table of one sink."""
    return f"{sink_tables(stream)}{check_name('sink', sink)}/"


def is_table_file(name: str) -> bool:
    """Whether it is the name of rows staged for the table of a sink."""
    return name.endswith(_TABLE_FILE)


def epoch_prefix(stream: str, epoch: int) -> str:
    """Return the prefix of all object names of one writer epoch."""
    return f"{stream_prefix(stream)}{epoch:08d}/"


def epoch_marks(stream: str) -> str:
    """Return the prefix of a stream's epoch marks, separate from its objects, so that sweeps do not list them."""
    return f"{_EPOCHS}/{check_name('stream', stream)}/"


def epoch_mark(stream: str, epoch: int) -> str:
    """Return the name of the object that marks a writer epoch."""
    return f"{epoch_marks(stream)}{epoch:08d}"


def fork_mark(stream: str, fork: str) -> str:
    """Return the name of the object that marks another stream as a fork of this one, or of one of its forks."""
    return f"{epoch_marks(stream)}{_FORK}{check_name('stream', fork)}"


ALL_EPOCHS = f"{_EPOCHS}/"
"""the prefix of all streams' marks"""


def stream_of_mark(name: str) -> str | None:
    """Return the stream that a mark belongs to; None for other names."""
    head, _, rest = name.partition("/")
    return rest.partition("/")[0] if head == _EPOCHS and "/" in rest else None


def fork_of_mark(name: str) -> str | None:
    """Return the fork of a mark's name; None for other names."""
    found = _FORK_MARK.fullmatch(name)
    return found[1] if found else None


def _writer(operator: str, variable: str | None, subtask: int, attempt: int | str) -> str:
    """Return `<operator>.<variable>.<subtask>.<attempt>`; a variable has one part, two (`recent.bounds`), or none."""
    check_name("operator", operator)
    parts = [] if variable is None else variable.split(".")
    for part in parts:
        check_name("variable", part)
    if not 0 <= subtask < 10**5 or not _ATTEMPT.fullmatch(str(attempt)):
        raise UsageError(f"subtask {subtask} or attempt {attempt!r} cannot be part of an object name")
    return ".".join([operator, *parts, f"{subtask:05d}", str(attempt)])


_CATALOG = "_catalog"
_OURS = re.compile(
    rf"{_CATALOG}/([a-z][a-z0-9_-]{{0,63}})/(?:(?P<steps>steps-)?(?P<epoch>[0-9]{{8}})-(?P<number>[0-9]{{12}})|beginning-[0-9a-f]+)"
)


def extract_prefix(stream: str) -> str:
    """Return the prefix of these objects of a stream, separate from its other objects, so that sweeps do not list
    them."""
    return f"{_CATALOG}/{check_name('stream', stream)}/"


def extract_name(stream: str, epoch: int, number: int) -> str:
    """Return the name of an extract."""
    return f"{extract_prefix(stream)}{epoch:08d}-{number:012d}"


def steps_part_name(stream: str, epoch: int, number: int) -> str:
    """Return the name of the steps that are written with an extract."""
    return f"{extract_prefix(stream)}steps-{epoch:08d}-{number:012d}"


def beginning_name(stream: str, hash: str) -> str:
    """Return the name of a step 0 whose bytes have this hash (hex)."""
    return f"{extract_prefix(stream)}beginning-{hash}"


def extract_number(name: str) -> tuple[int, int] | None:
    """Return (epoch, number) of an extract's name; None for other names."""
    found = _OURS.fullmatch(name)
    return (int(found["epoch"]), int(found["number"])) if found and found["epoch"] and not found["steps"] else None


def steps_part_number(name: str) -> tuple[int, int] | None:
    """Return (epoch, number) of the name of a part with steps; None for other names."""
    found = _OURS.fullmatch(name)
    return (int(found["epoch"]), int(found["number"])) if found and found["steps"] else None


def stream_of_extract(name: str) -> str | None:
    """Return the stream that such an object belongs to; None for other names."""
    found = _OURS.fullmatch(name)
    return found[1] if found else None


ALL_EXTRACTS = f"{_CATALOG}/"
"""the prefix of these objects of all streams"""


CATALOG_BACKUPS = "catalog-*-r*.backup"


@dataclass(frozen=True, slots=True)
class LocalLayout:
    """Paths on this machine below one warehouse directory."""

    root: Path

    @property
    def objects(self) -> Path:
        """Root of the filesystem store."""
        return self.root / "objects"

    @property
    def catalog(self) -> Path:
        """The SQLite catalog's file."""
        return self.root / "catalog.db"

    def work(self, stream: str, epoch: int) -> Path:
        """Return the directory of one writer epoch's working files; it may vanish at any time."""
        return path_below(self.root, "work", check_name("stream", stream), f"{epoch:08d}")

    def state(self, stream: str, epoch: int, operator: str, subtask: int) -> Path:
        """Return the directory of one subtask's working state."""
        return path_below(self.work(stream, epoch), "state", check_name("operator", operator), f"{subtask:05d}")

    def spark_log(self, stream: str, epoch: int) -> Path:
        """Return Spark's checkpointLocation of one epoch."""
        return path_below(self.work(stream, epoch), "spark")

    def sink(self, stream: str) -> Path:
        """Return the directory to which the stream's sink writes."""
        return path_below(self.root, "sink", check_name("stream", stream))

    def source(self, stream: str) -> Path:
        """Return the directory in which the stream's source may keep the files it reads."""
        return path_below(self.root, "source", check_name("stream", stream))

    def restored_directory(self, stream: str, checkpoint: int) -> Path:
        """Return the default directory to which the state of one checkpoint is restored."""
        return path_below(self.root, "restored", check_name("stream", stream), f"{checkpoint:012d}")

    def restored_series(self, stream: str) -> Path:
        """Return the directory to which many checkpoints are restored, each under a label."""
        return path_below(self.root, "restored", check_name("stream", stream), "series")

    def scratch(self) -> Path:
        """Return the directory of files that processes need only while they read.

        A machine that has no warehouse directory, as an executor may, has the system's directory of temporary files.
        """
        return self.root / "work" / ".scratch" if self.root.is_dir() else Path(tempfile.gettempdir())

    @property
    def dagster(self) -> Path:
        """Dagster's home, for runs launched from its page."""
        return self.root / "dagster"


def catalog_backup(directory: Path, time: datetime, revision: str) -> Path:
    """Return the default path of a backup of a catalog with this revision at a time (UTC)."""
    return path_below(directory, f"catalog-{time:%Y%m%dT%H%M%S.%fZ}-r{revision}.backup")
