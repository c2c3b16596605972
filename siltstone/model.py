"""The engine's value types: frozen, comparable, free of I/O. Words as in docs/glossary.md."""

import re
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise

from siltstone.errors import UsageError

DEFAULT_MAX_PARALLELISM = 128
MAX_MAX_PARALLELISM = 32768
OUTAGE_S = 60.0
"""how long a call of an open catalog waits for it to come back, by default"""
LATEST = "latest"
"""what the newest checkpoint of a stream is called"""
MAX_EPOCH = 99_999_999
"""the highest writer epoch: object names hold it in eight digits"""
_NAME = re.compile(r"[a-z][a-z0-9_-]*")


def check_name(what: str, name: str) -> str:
    """Return `name` if it is an identifier `[a-z][a-z0-9_-]*` of at most 64 characters.

    Names become parts of object names, so this is also what keeps every path inside the warehouse.

    Raises:
        UsageError: it is not; `what` says what was being named.
    """
    if len(name) > 64 or not _NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} is not a {what} name: use a lower-case letter, then letters, digits, _ or - (at most 64)"
        )
    return name


def check_table_name(name: str) -> str:
    """Return `name` if it is a variable's name, or a table of one, such as `recent.bounds`: two names and a dot.

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


class Kind(StrEnum):
    """How a variable changes."""

    INCREMENTAL = "incremental"
    """a table with a primary key, logged change by change"""
    OPAQUE = "opaque"
    """bytes, saved whole at every checkpoint"""
    INDEX = "index"
    """no variable: what says where a segment's variables are"""


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
        """The groups in both; an empty range (start == end) where there are none."""
        start = max(self.start, other.start)
        return KeyGroupRange(start, max(start, min(self.end, other.end)))

    def split(self, parts: int) -> list["KeyGroupRange"]:
        """Contiguous ranges, as even as can be, in order: part i starts at `start + ceil(i * n / parts)`.

        The same rule as Flink's, so that `group * parts // n` names the part of a group.
        """
        n = len(self)
        edges = [self.start - (-i * n // parts) for i in range(parts + 1)]
        return [KeyGroupRange(a, b) for a, b in pairwise(edges)]


@dataclass(frozen=True, slots=True)
class RangeChecksums:
    """A checksum for each of an object's successive ranges of bytes, so that a part of it can be verified by itself.

    Attributes:
        algorithm: what the checksums are (`store.checksums`).
        range_bytes: bytes in a range; the last one may be shorter.
        checksums: those of the ranges in order, joined (hex).
    """

    algorithm: str
    range_bytes: int
    checksums: str


@dataclass(frozen=True, slots=True)
class StoredObject:
    """One object as the store wrote it: its name, size in bytes, and checksum (`store.checksums`).

    `ranges` are there for what may be read in parts; they say nothing that tells one object from another. `digest` is
    there for a checkpoint's manifest that the catalog names: the digest of the state that it has to state.
    """

    name: str
    bytes: int
    checksum: str
    ranges: RangeChecksums | None = field(default=None, compare=False)
    digest: str | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Handle:
    """Where the bytes of one variable of one subtask at one checkpoint are.

    `checksum` (`store.checksums`) covers exactly `length` bytes at `offset` of `object`. `rows` counts table rows
    (base) or changes (delta). `previous` is the checkpoint this delta builds on, 0 for a base. Handles of one object
    overlap nowhere and leave no byte out, so whoever reads all of them has verified the object (promise 6).
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
    """sequence number of the change in its writer; 0 where there is only one"""
