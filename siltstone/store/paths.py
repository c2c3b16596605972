"""Every object name and every local path, built in this file and nowhere else.

    <warehouse>/
    |- objects/                                 root of the filesystem store; below it, object names:
    |  |- .tmp/                                     objects still being written; never listed, never read
    |  |- _epochs/<stream>/<epoch:08d>              that a writer epoch was begun (`catalog.epochs`)
    |  |- _epochs/<stream>/fork-<fork>              that there is a fork, which shares objects
    |  |- _warehouse/identity                       which warehouse this is; the catalog has the same (`store.identity`)
    |  '- <stream>/
    |     '- <epoch:08d>/                           writer epoch
    |        '- <checkpoint:012d>/
    |           |- manifest.arrow                                        all that the checkpoint wrote
    |           |- <log>.segment                                         segments that one uploader stored at once
    |           |- <log>.NON  <log>.INCR  <log>.INDEX                    the same in a store that keeps them apart
    |           |- <operator>.<variable>.<subtask:05d>.<attempt>.base.parquet      a base or materialization
    |           |- <operator>.<variable>.<part:05d>.<id>.materialized.parquet     a materialization, and
    |           |- <operator>.<id>.materialized.arrow                             its manifest
    |           |- <operator>.<subtask:05d>.<attempt>.output.arrow                rows for a sink, until it has them
    |           '- <operator>.<variable>.<subtask:05d>.<attempt>.snapshot.parquet  a full snapshot, for proof
    |- catalog.db                               SQLite catalog (unless another one is named)
    |- catalog-<time>-r<revision>.backup        what a catalog held then: a SQLite catalog, too
    |- work/<stream>/<epoch:08d>/               may vanish at any time
    |  |- state/<operator>/<subtask:05d>/           working state of one subtask
    |  '- spark/                                    Spark's own offset, commit and source logs
    |- source/<stream>/                         what the stream's own source prepared to read
    |- sink/<stream>/                           what the stream's own sink wrote
    |- restored/<stream>/<checkpoint:012d>/     state restored for others to read, proven, as Parquet
    |- restored/<stream>/series/<label>/        the same of many checkpoints, such as those of each day
    '- dagster/                                 Dagster's home: its runs and events

In a store that is not a local directory the object names are the same under the store's prefix. A name begins
with stream, epoch and checkpoint, so that what an unfinished checkpoint left behind is found without listing
everything. Names are plain ASCII and hold neither `..` nor a leading `/` or `.`, and paths are joined by `below`,
which refuses symbolic links, so none leads out of the warehouse (promise 8).
"""

import os
import re
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Self

from siltstone.errors import UsageError
from siltstone.model import MAX_EPOCH, check_name

TEMPORARY = ".tmp"
CATALOG_BACKUPS = "catalog-*-r*.backup"
"""matches what `catalog_backup` names"""
IDENTITY = "_warehouse/identity"
"""the object that says which warehouse a store holds; no stream's name begins with an underscore"""
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_EPOCHS = "_epochs"
_FORK = "fork-"
_SNAPSHOT = ".snapshot.parquet"
_BASE = ".base.parquet"
_MATERIALIZED = ".materialized.parquet"
_MATERIALIZATION = ".materialized.arrow"
_OUTPUT = ".output.arrow"
_OPAQUE = ".NON"
_PART = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,254}")
_LABEL = re.compile(r"[A-Za-z0-9_:-][A-Za-z0-9._:-]{0,99}")
_ATTEMPT = re.compile(r"[A-Za-z0-9_-]{1,64}")
_FILE = re.compile(
    r"manifest\.arrow|[A-Za-z0-9_-]{1,64}\.(segment|NON|INCR|INDEX)"
    r"|[a-z][a-z0-9_-]*(\.[a-z][a-z0-9_-]*){1,2}\.\d{5}\.[A-Za-z0-9_-]{1,64}\.(base|snapshot|materialized)\.parquet"
    r"|[a-z][a-z0-9_-]*\.[A-Za-z0-9_-]{1,64}\.materialized\.arrow"
    r"|[a-z][a-z0-9_-]*(\.[a-z][a-z0-9_-]*)?\.\d{5}\.[A-Za-z0-9_-]{1,64}\.output\.arrow"
)
_FORK_MARK = re.compile(rf"{_EPOCHS}/[a-z][a-z0-9_-]*/{_FORK}([a-z][a-z0-9_-]*)")
_PLACE = re.compile(r"([a-z][a-z0-9_-]*)/([0-9]{8})/([0-9]{12})/[^/]+")


def check_object_name(name: str) -> str:
    """Return `name` if it is `/`-separated parts of letters, digits, `.`, `_` and `-`, none led by a dot.

    Raises:
        UsageError: it is not.
    """
    if not is_object_name(name):
        raise UsageError(f"{name!r} is not an object name: use /-separated parts of letters, digits, '.', '_' and '-'")
    return name


def is_object_name(name: str) -> bool:
    """Is it a name that a store takes, as `check_object_name` says?"""
    return 0 < len(name) <= 1024 and all(_PART.fullmatch(part) for part in name.split("/"))


def check_prefix(prefix: str) -> str:
    """Return `prefix` if an object name can start with it; the empty prefix is good.

    Raises:
        UsageError: no object name starts so.
    """
    if prefix:
        check_object_name(prefix.removesuffix("/"))
    return prefix


def below(root: Path, *parts: str) -> Path:
    """`root / parts`, which lies below `root` whatever the parts are: each is one plain name, and no link leads away.

    `root` itself may be a symbolic link, or lie behind one: whoever names a root chooses it.

    Raises:
        UsageError: a part is no plain name, or is a symbolic link.
    """
    path, there = root, True
    for part in parts:
        if not part or part in (".", "..") or "/" in part or os.sep in part or "\0" in part:
            raise UsageError(f"{part!r} cannot be a name below {root}: use one name without slashes")
        path = path / part
        if there:
            try:
                linked = stat.S_ISLNK(os.lstat(path).st_mode)
            except (FileNotFoundError, NotADirectoryError):
                there = False
                continue
            if linked:
                raise _leads_away(path, root)
    return path


def _leads_away(path: Path, root: Path) -> UsageError:
    return UsageError(f"{path} is a symbolic link, and may lead out of {root}: replace it by what it points to")


@contextmanager
def opened_directories(root: Path, parts: Sequence[str], *, make: bool = False) -> Iterator[list[int]]:
    """Descriptors of `root` and of each directory on the way down `parts`, which are plain names, for use as `dir_fd`.

    Unlike a path, which is looked up anew at each use, they stay the same directories whatever is exchanged meanwhile.

    Args:
        make: whether what is missing below `root` is made.

    Raises:
        UsageError: a symbolic link is on the way.
        OSError: a directory is missing or cannot be opened.
    """
    opened: list[int] = []
    try:
        opened.append(os.open(root, _DIRECTORY))
        for depth, part in enumerate(parts):
            try:
                opened.append(_open_directory(part, opened[-1], make=make))
            except OSError:
                with suppress(FileNotFoundError):
                    if stat.S_ISLNK(os.lstat(part, dir_fd=opened[-1]).st_mode):
                        raise _leads_away(root.joinpath(*parts[: depth + 1]), root) from None
                raise
        yield opened
    finally:
        for descriptor in opened:
            os.close(descriptor)


def _open_directory(part: str, above: int, *, make: bool) -> int:
    try:
        return os.open(part, _DIRECTORY | os.O_NOFOLLOW, dir_fd=above)
    except FileNotFoundError:
        if not make:
            raise
    with suppress(FileExistsError):
        os.mkdir(part, dir_fd=above)
    return os.open(part, _DIRECTORY | os.O_NOFOLLOW, dir_fd=above)


@dataclass(frozen=True, slots=True)
class CheckpointPath:
    """Object names of one checkpoint, as one writer epoch writes it.

    `attempt` makes the names of two attempts at the same work differ; the loser's objects become orphans.

    Raises:
        UsageError: a stream, operator or variable name that is no name, a negative or overlong number.
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
        """What all names of the checkpoint start with, the slash included."""
        return f"{epoch_prefix(self.stream, self.epoch)}{self.checkpoint:012d}/"

    def manifest(self) -> str:
        """The checkpoint's manifest."""
        return f"{self.prefix}manifest.arrow"

    def segment(self, log: str, section: str = "segment") -> str:
        """Segments stored at once, whole or one of their sections; `log` is unique to whoever stores them."""
        if not _ATTEMPT.fullmatch(log):
            raise UsageError(f"{log!r} cannot name a segment: use letters, digits, _ and -")
        return f"{self.prefix}{log}.{section}"

    def base(self, operator: str, variable: str, subtask: int, attempt: int | str) -> str:
        """A base form of one variable."""
        return f"{self.prefix}{_writer(operator, variable, subtask, attempt)}{_BASE}"

    def materialized(self, operator: str, variable: str, part: int, id: str) -> str:
        """A base of one variable that the materialization `id` wrote."""
        return f"{self.prefix}{_writer(operator, variable, part, id)}{_MATERIALIZED}"

    def materialization(self, operator: str, id: str) -> str:
        """The manifest of a materialization."""
        return f"{self.prefix}{check_name('operator', operator)}.{check_attempt(id)}{_MATERIALIZATION}"

    def output(self, output: str, subtask: int, attempt: str) -> str:
        """Rows that wait for a sink; `output` is an operator's name, or that and a name of its own after a dot."""
        operator, *own = output.split(".")
        return f"{self.prefix}{_writer(operator, '.'.join(own) if own else None, subtask, attempt)}{_OUTPUT}"

    def snapshot(self, operator: str, variable: str, subtask: int, attempt: int | str) -> str:
        """A full snapshot of one variable's live state."""
        return f"{self.prefix}{_writer(operator, variable, subtask, attempt)}{_SNAPSHOT}"

    @classmethod
    def of(cls, name: str) -> Self | None:
        """The checkpoint that an object name belongs to; None for a name that is not built here."""
        found = _PLACE.fullmatch(name)
        return cls(found[1], int(found[2]), int(found[3])) if found else None


def check_attempt(id: str) -> str:
    """Return `id` if it can be that of an attempt or materialization: letters, digits, `_` and `-`.

    Raises:
        UsageError: it is not.
    """
    if not _ATTEMPT.fullmatch(id):
        raise UsageError(f"{id!r} cannot be part of an object name: use letters, digits, _ and -")
    return id


def check_label(label: str) -> str:
    """Return `label` if a restored checkpoint can lie under it: letters, digits, `.`, `_`, `:` and `-`, no dot first.

    Raises:
        UsageError: it is not.
    """
    if not _LABEL.fullmatch(label):
        raise UsageError(f"{label!r} is no label: use letters, digits, '.', '_', ':' and '-', and no dot first")
    return label


def is_built_here(name: str) -> bool:
    """Is it the name of an object that Siltstone writes?"""
    return CheckpointPath.of(name) is not None and _FILE.fullmatch(name.rpartition("/")[2]) is not None


def is_base(name: str) -> bool:
    """Is it the name of a base form?"""
    return name.endswith(_BASE)


def is_opaque(name: str) -> bool:
    """Is it the name of segments' opaque variables, stored apart?"""
    return name.endswith(_OPAQUE)


def materialization_of(name: str) -> str | None:
    """The id of the materialization that wrote an object, None for any other object."""
    for suffix in (_MATERIALIZED, _MATERIALIZATION):
        if name.endswith(suffix):
            return name.removesuffix(suffix).rpartition(".")[2]
    return None


def snapshot_of(name: str) -> tuple[str, str]:
    """(operator, table) of a snapshot's object."""
    operator, *table, _subtask, _attempt = name.rpartition("/")[2].removesuffix(_SNAPSHOT).split(".")
    return operator, ".".join(table)


def stream_prefix(stream: str) -> str:
    """What all object names of a stream start with."""
    return f"{check_name('stream', stream)}/"


def epoch_prefix(stream: str, epoch: int) -> str:
    """What all object names of one writer epoch start with."""
    return f"{stream_prefix(stream)}{epoch:08d}/"


def epoch_marks(stream: str) -> str:
    """What the names of a stream's epoch marks start with; apart from its objects, so that no sweep lists them."""
    return f"{_EPOCHS}/{check_name('stream', stream)}/"


def epoch_mark(stream: str, epoch: int) -> str:
    """The object that says that a writer epoch was begun."""
    return f"{epoch_marks(stream)}{epoch:08d}"


def fork_mark(stream: str, fork: str) -> str:
    """The object that says that another stream is a fork of this one, or of a fork of it."""
    return f"{epoch_marks(stream)}{_FORK}{check_name('stream', fork)}"


def marked_fork(name: str) -> str | None:
    """The fork that a mark names; None for the name of anything else."""
    found = _FORK_MARK.fullmatch(name)
    return found[1] if found else None


def catalog_backup(directory: Path, time: datetime, revision: str) -> Path:
    """Where a catalog of this revision is backed up to at a time, in UTC, unless another file is named."""
    return below(directory, f"catalog-{time:%Y%m%dT%H%M%S.%fZ}-r{revision}.backup")


def _writer(operator: str, variable: str | None, subtask: int, attempt: int | str) -> str:
    """`<operator>.<variable>.<subtask>.<attempt>`; a variable may have two parts, as in `recent.bounds`, or none."""
    check_name("operator", operator)
    parts = [] if variable is None else variable.split(".")
    for part in parts:
        check_name("variable", part)
    if not 0 <= subtask < 10**5 or not _ATTEMPT.fullmatch(str(attempt)):
        raise UsageError(f"subtask {subtask} or attempt {attempt!r} cannot be part of an object name")
    return ".".join([operator, *parts, f"{subtask:05d}", str(attempt)])


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
        """What one writer epoch keeps while it runs; may vanish at any time."""
        return below(self.root, "work", check_name("stream", stream), f"{epoch:08d}")

    def state(self, stream: str, epoch: int, operator: str, subtask: int) -> Path:
        """Working state of one subtask."""
        return below(self.work(stream, epoch), "state", check_name("operator", operator), f"{subtask:05d}")

    def spark_log(self, stream: str, epoch: int) -> Path:
        """Spark's checkpointLocation of one epoch."""
        return below(self.work(stream, epoch), "spark")

    def sink(self, stream: str) -> Path:
        """Where the stream's own sink writes."""
        return below(self.root, "sink", check_name("stream", stream))

    def source(self, stream: str) -> Path:
        """Where the stream's own source may keep the files it reads."""
        return below(self.root, "source", check_name("stream", stream))

    def restored(self, stream: str, checkpoint: int) -> Path:
        """Where the state of one checkpoint is restored to, unless another place is named."""
        return below(self.root, "restored", check_name("stream", stream), f"{checkpoint:012d}")

    def restored_series(self, stream: str) -> Path:
        """Where many checkpoints are restored to, each under a label."""
        return below(self.root, "restored", check_name("stream", stream), "series")

    @property
    def dagster(self) -> Path:
        """Dagster's home, for runs launched from its page."""
        return self.root / "dagster"
