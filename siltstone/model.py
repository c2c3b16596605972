"""The engine's value types: frozen, comparable, free of I/O. Words as in docs/glossary.md."""

import re
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise

from siltstone.errors import UsageError

DEFAULT_MAX_PARALLELISM = 128
MAX_MAX_PARALLELISM = 32768
OUTAGE_S = 60.0
"""how long a catalog call waits for an unreachable catalog, by default"""
LATEST = "latest"
"""the name of a stream's newest checkpoint"""
MAX_EPOCH = 99_999_999
"""the highest writer epoch: object names hold it in eight digits"""
MAX_ID = 500_000_000_000
"""the highest checkpoint and step that is read: object names hold them in twelve digits, so that as many can follow"""
MAX_NUMBER = (1 << 63) - 1
"""the highest number that a catalog holds"""
_NAME = re.compile(r"[a-z][a-z0-9_-]*")


def check_name(what: str, name: str) -> str:
    """Return `name` if it is an identifier `[a-z][a-z0-9_-]*` of at most 64 characters.

    Names become parts of object names, so this check also keeps every path inside the warehouse.

    Raises:
        UsageError: it is not; the message says which name (`what`).
    """
    if len(name) > 64 or not _NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} is not a {what} name: use a lower-case letter, then letters, digits, _ or - (at most 64)"
        )
    return name


def check_table_name(name: str) -> str:
    """Return `name` if it names a variable, or a variable's table, such as `recent.bounds`: two names and a dot.

    Raises:
        UsageError: it is not.
    """
    for part in name.split(".", 1):
        check_name("variable", part)
    return name


class Form(StrEnum):
    """How a variable is written in one checkpoint."""

    BASE = "base"
    """everything it holds"""
    DELTA = "delta"
    """what changed since its previous checkpoint"""
    FILES = "files"
    """everything, in several files: all of one step are read together, and earlier checkpoints may have written some"""


class Kind(StrEnum):
    """How a variable changes."""

    INCREMENTAL = "incremental"
    """a table with a primary key, logged change by change"""
    OPAQUE = "opaque"
    """bytes, saved whole at every checkpoint"""
    INDEX = "index"
    """not a variable: it says where a segment's variables are"""


@dataclass(frozen=True, slots=True, order=True)
class KeyGroupRange:
    """Key groups `start <= g < end`."""

    start: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start

    def __contains__(self, group: int) -> bool:
        return self.start <= group < self.end

    def intersect(self, other: "KeyGroupRange") -> "KeyGroupRange":
        """Return the groups in both ranges; an empty range (start == end) if there are none."""
        start = max(self.start, other.start)
        return KeyGroupRange(start, max(start, min(self.end, other.end)))

    def without(self, other: "KeyGroupRange") -> list["KeyGroupRange"]:
        """Return the groups that `other` does not have, as at most two ranges that are not empty."""
        rest = (
            KeyGroupRange(self.start, min(self.end, other.start)),
            KeyGroupRange(max(self.start, other.end), self.end),
        )
        return [part for part in rest if part.start < part.end]

    def split(self, parts: int) -> list["KeyGroupRange"]:
        """Split into `parts` contiguous, even ranges, in order: part i starts at `start + ceil(i * n / parts)`.

        The rule is Flink's: a group belongs to part `group * parts // n`.
        """
        n = len(self)
        edges = [self.start - (-i * n // parts) for i in range(parts + 1)]
        return [KeyGroupRange(a, b) for a, b in pairwise(edges)]


@dataclass(frozen=True, slots=True)
class RangeChecksums:
    """A checksum for each successive range of an object's bytes, so that a part can be verified alone.

    Attributes:
        algorithm: the algorithm (`store.checksums`).
        range_bytes: bytes per range; the last one may be shorter.
        checksums: the ranges' checksums in order, joined (hex).
    """

    algorithm: str
    range_bytes: int
    checksums: str


@dataclass(frozen=True, slots=True)
class StoredObject:
    """One object as the store wrote it: its name, size in bytes, and checksum (`store.checksums`).

    `ranges` are set for objects that are read in parts; equality ignores them. `digest` is set for a checkpoint's
    manifest in the catalog: the state digest that the manifest must contain.
    """

    name: str
    bytes: int
    checksum: str
    ranges: RangeChecksums | None = field(default=None, compare=False)
    digest: str | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class SinkFile(StoredObject):
    """A staged object that is a Parquet file of a sink's Delta table. Other staged objects are rows in Arrow's format.

    `statistics` are the file's, for the table's log, as JSON.
    """

    statistics: str = field(kw_only=True)


@dataclass(frozen=True, slots=True)
class Handle:
    """Where the bytes of one variable of one subtask at one checkpoint are.

    `checksum` (`store.checksums`) covers exactly `length` bytes at `offset` of `object`. `rows` counts table rows
    (base) or changes (delta). `previous` is the checkpoint this delta builds on, 0 for a base. Handles of one object
    do not overlap and leave no byte out, so reading all of them verifies the object (objects are verified at every
    read: promise 6).
    """

    operator: str
    variable: str
    kind: Kind
    form: Form
    object: str
    offset: int
    length: int
    checksum: str
    key_groups: KeyGroupRange
    rows: int
    previous: int
    sqn: int = 0
    """sequence number of the change: its step; 0 for what a materialization wrote"""
