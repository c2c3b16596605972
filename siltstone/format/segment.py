"""A segment: what one changelog writer stores at once, as three byte strings (US 9471438).

    k.NON     opaque (non-incremental) variables: all their values, or those of the key groups that changed
    k.INCR    the blocks of all incremental variables in delta form, end to end
    k.INDEX   per table of each incremental variable: its form, where it is, what it builds on (`index`); a footer

A base form is a separate Parquet object, which the index names. In a key-value store, where reading part of a value
costs as much as all of it, the three are three values. In an object store they are joined, so that a handle points
directly at a block. Either way, many segments may share one object:

    NON | INCR | INDEX footer xxh3-64 length-of-both(4 bytes) "SILTSEG1" | NON | INCR | INDEX ... "SILTSEG1" | ...

The footer has the operator, the subtask's key groups, the checkpoint, the lengths, the variables of NON, and, if one of
these does not have all values, which checkpoint each builds on. Every byte of a segment belongs to exactly one handle:
a variable's, or the index's.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from siltstone.decoding import translate_decode_errors
from siltstone.errors import CorruptObject, UsageError
from siltstone.format.block import Block
from siltstone.format.coding import Bytes, Decoder, Encoder, newer_format_error, seal, unseal
from siltstone.format.index import IndexEntry, decode_index, encode_index
from siltstone.format.opaque import encode_opaque
from siltstone.model import (
    MAX_MAX_PARALLELISM,
    Form,
    Handle,
    KeyGroupRange,
    Kind,
    StoredObject,
    check_name,
    check_table_name,
)
from siltstone.store.checksums import DEFAULT, checksum_of

MAGIC = b"SILTSEG1"
INDEX_HANDLE = "INDEX"
"""the variable name in an index's handle, which a user's variable cannot have"""
_LENGTH_BYTES = 4


class Section(StrEnum):
    """One of the three byte strings, by the suffix of its key."""

    NON = "NON"
    INCR = "INCR"
    INDEX = "INDEX"


Places = Mapping[Section, tuple[str, int]]
"""where a segment's sections begin: object and offset"""


@dataclass(frozen=True)
class Segment:
    """One subtask's part of one checkpoint, or a piece of it.

    `index` is only the index itself; `opaque` is (variable, length in bytes) in the order of `non`; `opaque_previous`
    is per opaque variable the checkpoint that its values build on, 0 if they are all; empty if they all are.
    """

    operator: str
    key_groups: KeyGroupRange
    checkpoint: int
    non: Bytes
    incr: Bytes
    index: Bytes
    opaque: tuple[tuple[str, int], ...]
    opaque_previous: tuple[int, ...] = ()

    @property
    def sections(self) -> dict[Section, Bytes]:
        """The three stored byte strings; the footer is part of INDEX."""
        return {Section.NON: self.non, Section.INCR: self.incr, Section.INDEX: self._trailer}

    def pack(self) -> bytes:
        """Return the three byte strings joined."""
        return b"".join(self.sections.values())

    def places(self, name: str, offset: int = 0) -> Places:
        """Return where the sections are if the object `name` has the packed segment at `offset`."""
        incr = offset + len(self.non)
        return {Section.NON: (name, offset), Section.INCR: (name, incr), Section.INDEX: (name, incr + len(self.incr))}

    @cached_property
    def _trailer(self) -> bytes:
        """INDEX, footer, and the length and magic number that locate them from the end."""
        out = Encoder()
        out.varints([self.checkpoint, self.key_groups.start, self.key_groups.end])
        out.varints([len(self.non), len(self.incr), len(self.index), len(self.opaque)])
        out.texts([self.operator, *(variable for variable, _ in self.opaque)])
        out.varints([length for _, length in self.opaque])
        if any(self.opaque_previous):
            out.varints(self.opaque_previous)
        footer = seal(out.finish(), b"")
        return b"".join((self.index, footer, len(footer).to_bytes(_LENGTH_BYTES, "little"), MAGIC))

    @classmethod
    def unpack(cls, data: Bytes, name: str = "a segment") -> "Segment":
        """Split a segment that `pack` made; its three parts are views of `data`, not copies.

        Raises:
            CorruptObject: cut, altered in its frame, or not a segment; the message contains `name`.
        """
        view = memoryview(data).cast("B")
        found, sizes = _read_trailer(view, name)
        non, incr, trailer = sizes
        if non + incr + trailer != len(view):
            raise CorruptObject(f"{name} is cut short, or not a segment")
        return cls.of_trailer(found, view[:non], view[non : non + incr])

    @classmethod
    def of_trailer(cls, found: "_Trailer", non: Bytes, incr: Bytes) -> "Segment":
        """Make a segment of these two sections and a decoded trailer."""
        own = found.index, found.opaque, found.opaque_previous
        return cls(found.operator, found.key_groups, found.checkpoint, non, incr, *own)

    def entries(self) -> list[IndexEntry]:
        """Decode the index's entries."""
        checkpoint, entries = decode_index(self.index, f"the index of {self.operator}")
        if checkpoint != self.checkpoint:
            raise CorruptObject(f"the index of {self.operator} is of checkpoint {checkpoint}, not {self.checkpoint}")
        return entries

    def handles(self, places: Places, checksums: str = DEFAULT) -> list[Handle]:
        """Return handles of everything, if the sections are stored at `places`: opaque variables, tables, the index.

        `checksums` is the algorithm of checksums computed here; those of tables are in the index.
        """
        handles: list[Handle] = []
        start = 0
        builds_on = self.opaque_previous or (0,) * len(self.opaque)
        for (variable, length), previous in zip(self.opaque, builds_on, strict=True):
            data = memoryview(self.non)[start : start + length]
            place = _shift(places[Section.NON], start)
            handles.append(self._handle(variable, Kind.OPAQUE, data, place, checksums, previous))
            start += length
        for entry in self.entries():
            delta = entry.form == Form.DELTA
            name, offset = _shift(places[Section.INCR], entry.offset) if delta else (entry.source, 0)
            handles.append(
                Handle(
                    operator=self.operator,
                    variable=entry.variable,
                    kind=Kind.INCREMENTAL,
                    form=entry.form,
                    object=name,
                    offset=offset,
                    length=entry.length,
                    checksum=entry.checksum,
                    key_groups=self.key_groups,
                    rows=entry.rows,
                    previous=entry.previous_checkpoint,
                    sqn=entry.sqn,
                )
            )
        handles.append(self._handle(INDEX_HANDLE, Kind.INDEX, self._trailer, places[Section.INDEX], checksums, 0))
        return handles

    def _handle(
        self, variable: str, kind: Kind, data: Bytes, place: tuple[str, int], checksums: str, previous: int
    ) -> Handle:
        """Make the handle of what builds on a checkpoint; on nothing, if that is 0."""
        form, checksum = Form.DELTA if previous else Form.BASE, checksum_of(data, checksums)
        name, offset = place
        return Handle(
            self.operator, variable, kind, form, name, offset, len(data), checksum, self.key_groups, 0, previous
        )


def read_index(section: Bytes, name: str = "an index") -> list[IndexEntry]:
    """Decode the entries of a segment from its section INDEX alone.

    Raises:
        CorruptObject: cut, altered, or not an index; the message contains `name`.
    """
    found, _ = _read_trailer(memoryview(section).cast("B"), name)
    return Segment.of_trailer(found, b"", b"").entries()


@dataclass(frozen=True)
class _Trailer:
    operator: str
    key_groups: KeyGroupRange
    checkpoint: int
    index: memoryview
    opaque: tuple[tuple[str, int], ...]
    opaque_previous: tuple[int, ...]


def _read_trailer(view: memoryview, name: str) -> tuple[_Trailer, tuple[int, int, int]]:
    """Decode INDEX and footer at the end of `view`, and the lengths of the three sections."""
    with translate_decode_errors(name, "a segment"):
        tail = len(view) - len(MAGIC) - _LENGTH_BYTES
        last = bytes(view[-len(MAGIC) :])
        if tail >= 0 and last[:-1] == MAGIC[:-1] and last[-1:].isdigit() and last > MAGIC:
            raise newer_format_error(name, last[-1:].decode())
        if tail < 0 or last != MAGIC:
            raise CorruptObject(f"{name} is cut short, or not a segment")
        start = tail - int.from_bytes(view[tail : tail + _LENGTH_BYTES], "little")
        if start < 0:
            raise CorruptObject(f"{name} is not a segment: its footer is longer than itself")
        read = Decoder(unseal(view[start:tail], b"", name), name)
        checkpoint, first, end, non, incr, index, opaques = (read.count() for _ in range(7))
        if index > start or opaques > non:
            raise read.damage_error("its sections do not add up")
        if not first <= end <= MAX_MAX_PARALLELISM:
            raise read.damage_error(f"its key groups are {first} to {end}")
        operator, *variables = read.texts(1 + opaques)
        check_name("operator", operator)
        for variable in variables:
            check_table_name(variable)
        lengths = read.varints(opaques).tolist()
        if sum(lengths) != non:
            raise read.damage_error("its opaque variables do not add up")
        previous = () if read.ended else tuple(read.varints(opaques).tolist())
        if any(each >= checkpoint for each in previous):
            raise read.damage_error("an opaque variable builds on no earlier checkpoint")
        opaque = tuple(zip(variables, lengths, strict=True))
        found = _Trailer(operator, KeyGroupRange(first, end), checkpoint, view[start - index : start], opaque, previous)
        return found, (non, incr, len(view) - start + index)


def _shift(place: tuple[str, int], offset: int) -> tuple[str, int]:
    return place[0], place[1] + offset


class SegmentBuilder:
    """Builds one segment; each variable once per sequence number, tables always in the same order.

    A table's position in the index is the patent's "offset of its entry in that checkpoint's index".
    """

    def __init__(self, operator: str, checkpoint: int, key_groups: KeyGroupRange, checksums: str = DEFAULT) -> None:
        self._operator = operator
        self._checksums = checksums
        self._checkpoint = checkpoint
        self._key_groups = key_groups
        self._entries: list[IndexEntry] = []
        self._blocks: list[bytes] = []
        self._opaque: dict[str, bytes] = {}
        self._opaque_previous: list[int] = []
        self._end = 0

    def add_delta(
        self, table: str, block: Block, previous_checkpoint: int, previous_entry: int, *, digest: int, sqn: int = 0
    ) -> None:
        """Add a table in delta form: `block` builds on entry `previous_entry` of `previous_checkpoint`'s index.

        `digest` is the sum modulo 2**64 of the table's digests over the subtask's key groups, `sqn` the
        sequence number of the change, which is its step.
        """
        self._add(
            IndexEntry(
                variable=table,
                form=Form.DELTA,
                offset=self._end,
                previous_checkpoint=previous_checkpoint,
                previous_entry=previous_entry,
                length=len(block.data),
                rows=block.rows,
                checksum=checksum_of(block.data, self._checksums),
                digest=digest,
                first_key_group=block.first_key_group,
                key_group_offsets=block.key_group_offsets,
                sqn=sqn,
            )
        )
        self._blocks.append(block.data)
        self._end += len(block.data)

    def add_base(self, table: str, stored: StoredObject, rows: int, *, digest: int, sqn: int = 0) -> None:
        """Add a table in base form, the object `stored`; `digest` and `sqn` as for a delta."""
        self._add(
            IndexEntry(
                variable=table,
                form=Form.BASE,
                offset=0,
                previous_checkpoint=0,
                previous_entry=0,
                length=stored.bytes,
                rows=rows,
                checksum=stored.checksum,
                digest=digest,
                source=stored.name,
                sqn=sqn,
            )
        )

    def add_opaque(self, variable: str, values: Mapping[int, bytes], previous_checkpoint: int = 0) -> None:
        """Add an opaque variable: key group -> bytes; all of them, or those that changed since a checkpoint."""
        self._check_new(variable)
        self._opaque[variable] = encode_opaque(values)
        self._opaque_previous.append(previous_checkpoint)

    def build(self) -> Segment:
        """Return what was added, as three byte strings."""
        return Segment(
            self._operator,
            self._key_groups,
            self._checkpoint,
            b"".join(self._opaque.values()),
            b"".join(self._blocks),
            encode_index(self._checkpoint, self._entries),
            tuple((variable, len(data)) for variable, data in self._opaque.items()),
            tuple(self._opaque_previous) if any(self._opaque_previous) else (),
        )

    def _add(self, entry: IndexEntry) -> None:
        self._check_new(entry.variable, entry.sqn)
        self._entries.append(entry)

    def _check_new(self, variable: str, sqn: int = 0) -> None:
        if variable in self._opaque or any((e.variable, e.sqn) == (variable, sqn) for e in self._entries):
            raise UsageError(f"variable {variable} of operator {self._operator} was added to the segment twice")
