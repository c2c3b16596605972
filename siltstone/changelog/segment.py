"""A segment: one subtask's part of one checkpoint, as three byte strings (US 9471438).

    k.NON     every opaque (non-incremental) variable, whole
    k.INCR    the blocks of all incremental variables that are in delta form, end to end
    k.INDEX   per table of each incremental variable: its form, where it lies, what it builds on (`index`)

A base form is a Parquet object of its own, which the index names. In a key-value store the three are three
entries; in an object store they are sections of one packed object, so that a handle points straight at a
block in it:

    "SILTSEG1" | NON | INCR | INDEX | footer | xxh3-64 of the footer | length of both (4 bytes) | "SILTSEG1"

The footer holds the operator, the subtask's key groups, the checkpoint, the three lengths, and the variables
of NON.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import xxhash

from siltstone.changelog.block import Block
from siltstone.changelog.coding import Bytes, Decoder, Encoder, seal, unseal
from siltstone.changelog.index import IndexEntry, decode_index, encode_index
from siltstone.changelog.opaque import encode_opaque
from siltstone.errors import CorruptObject, UsageError
from siltstone.model import Form, Handle, KeyGroupRange, Kind, StoredObject

MAGIC = b"SILTSEG1"
_LENGTH_BYTES = 4


@dataclass(frozen=True)
class Segment:
    """One subtask's part of one checkpoint; `opaque` is (variable, length in bytes) in the order of `non`."""

    operator: str
    key_groups: KeyGroupRange
    checkpoint: int
    non: Bytes
    incr: Bytes
    index: Bytes
    opaque: tuple[tuple[str, int], ...]

    def pack(self) -> bytes:
        """The three as one object."""
        out = Encoder()
        out.varints([self.checkpoint, self.key_groups.start, self.key_groups.end])
        out.varints([len(self.non), len(self.incr), len(self.index), len(self.opaque)])
        out.texts([self.operator, *(variable for variable, _ in self.opaque)])
        out.varints([length for _, length in self.opaque])
        footer = seal(out.finish(), b"")
        length = len(footer).to_bytes(_LENGTH_BYTES, "little")
        return b"".join((MAGIC, self.non, self.incr, self.index, footer, length, MAGIC))

    @classmethod
    def unpack(cls, data: Bytes, name: str = "a segment") -> "Segment":
        """The segment that `pack` made; its three parts are views of `data`, not copies.

        Raises:
            CorruptObject: cut, altered in its frame, or no segment; `name` says where it came from.
        """
        view = memoryview(data).cast("B")
        tail = len(view) - len(MAGIC) - _LENGTH_BYTES
        if tail < len(MAGIC) or bytes(view[: len(MAGIC)]) != MAGIC or bytes(view[-len(MAGIC) :]) != MAGIC:
            raise CorruptObject(f"{name} is cut short, or no segment")
        start = tail - int.from_bytes(view[tail : tail + _LENGTH_BYTES], "little")
        if start < len(MAGIC):
            raise CorruptObject(f"{name} is no segment: its footer is longer than itself")
        read = Decoder(unseal(view[start:tail], b"", name), name)
        checkpoint, first, end, non, incr, index, opaques = (read.count() for _ in range(7))
        if len(MAGIC) + non + incr + index != start or opaques > non:
            raise read.fail("its sections do not add up")
        operator, *variables = read.texts(1 + opaques)
        lengths = read.varints(opaques).tolist()
        if sum(lengths) != non:
            raise read.fail("its opaque variables do not add up")
        edges = np.cumsum([len(MAGIC), non, incr, index]).tolist()
        non_part, incr_part, index_part = (view[a:b] for a, b in pairwise(edges))
        opaque = tuple(zip(variables, lengths, strict=True))
        return cls(operator, KeyGroupRange(first, end), checkpoint, non_part, incr_part, index_part, opaque)

    def entries(self) -> list[IndexEntry]:
        """What the index says."""
        checkpoint, entries = decode_index(self.index, f"the index of {self.operator}")
        if checkpoint != self.checkpoint:
            raise CorruptObject(f"the index of {self.operator} is of checkpoint {checkpoint}, not {self.checkpoint}")
        return entries

    def handles(self, name: str) -> list[Handle]:
        """Where each variable lies, if packed into the object `name`: opaque ones, then tables."""
        offset, handles = len(MAGIC), []
        for variable, length in self.opaque:
            checksum = xxhash.xxh3_128_hexdigest(memoryview(self.non)[offset - len(MAGIC) :][:length])
            place = (name, offset, length, checksum, self.key_groups)
            handles.append(Handle(self.operator, variable, Kind.OPAQUE, Form.BASE, *place, rows=0, previous=0))
            offset += length
        for entry in self.entries():
            delta = entry.form == Form.DELTA
            handles.append(
                Handle(
                    operator=self.operator,
                    variable=entry.variable,
                    kind=Kind.INCREMENTAL,
                    form=entry.form,
                    object=name if delta else entry.source,
                    offset=offset + entry.offset if delta else 0,
                    length=entry.length,
                    checksum=entry.checksum,
                    key_groups=self.key_groups,
                    rows=entry.rows,
                    previous=entry.previous_checkpoint,
                )
            )
        return handles


class SegmentBuilder:
    """Gathers one subtask's part of one checkpoint; each variable once, tables in the same order every time.

    Where a table's entry stands in the index is the patent's "offset of its entry in that checkpoint's
    index".
    """

    def __init__(self, operator: str, checkpoint: int, key_groups: KeyGroupRange) -> None:
        self._operator = operator
        self._checkpoint = checkpoint
        self._key_groups = key_groups
        self._entries: list[IndexEntry] = []
        self._blocks: list[bytes] = []
        self._opaque: dict[str, bytes] = {}
        self._end = 0

    def add_delta(
        self, table: str, block: Block, previous_checkpoint: int, previous_entry: int, *, digest: int
    ) -> None:
        """A table in delta form: `block` builds on entry `previous_entry` of `previous_checkpoint`'s index.

        `digest` is the sum modulo 2**64 of the table's digests over the subtask's key groups.
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
                checksum=xxhash.xxh3_128_hexdigest(block.data),
                digest=digest,
                first_key_group=block.first_key_group,
                key_group_offsets=block.key_group_offsets,
            )
        )
        self._blocks.append(block.data)
        self._end += len(block.data)

    def add_base(self, table: str, stored: StoredObject, rows: int, *, digest: int) -> None:
        """A table in base form, which is the object `stored`; `digest` as for a delta."""
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
            )
        )

    def add_opaque(self, variable: str, values: Mapping[int, bytes]) -> None:
        """An opaque variable: key group -> bytes."""
        self._check_new(variable)
        self._opaque[variable] = encode_opaque(values)

    def build(self) -> Segment:
        """What was added, as three byte strings."""
        return Segment(
            self._operator,
            self._key_groups,
            self._checkpoint,
            b"".join(self._opaque.values()),
            b"".join(self._blocks),
            encode_index(self._checkpoint, self._entries),
            tuple((variable, len(data)) for variable, data in self._opaque.items()),
        )

    def _add(self, entry: IndexEntry) -> None:
        self._check_new(entry.variable)
        self._entries.append(entry)

    def _check_new(self, variable: str) -> None:
        if variable in self._opaque or any(entry.variable == variable for entry in self._entries):
            raise UsageError(f"variable {variable} of operator {self._operator} was added to the segment twice")
