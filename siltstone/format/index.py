"""k.INDEX: where each incremental variable of one subtask is stored in one checkpoint (US 9471438).

The patent's four fields of an entry are `form`, `offset`, `previous_checkpoint` (sequence number of the
checkpoint with the variable's previous version) and `previous_entry` (the position of its entry in that
checkpoint's index). Here the index is column-oriented, and each of the four is stored as a run-length coded
difference from the expected value:

    form                 0 base, 1 delta
    offset               minus the end of the previous block in k.INCR              normally 0
    previous_checkpoint  this checkpoint minus it, deltas only                      normally 1
    previous_entry       minus this entry's own position, deltas only               normally 0

so that each costs at most one byte, and a column two bytes if all entries are alike. An entry also has length,
rows, checksum, digest, key-group offsets, and for a base the name of its Parquet object.

    "SILTIDX1" | checkpoint, entries | four fields | names | numbers | checksums and digests | key groups |
    xxh3-64

Checksums are encoded by `store.checksums.pack`, after their lengths.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from siltstone.decoding import translate_decode_errors
from siltstone.errors import UsageError
from siltstone.format.coding import KEY_GROUPS_MAX, Bytes, Decoder, Encoder, seal, unseal, unzigzag, zigzag
from siltstone.model import Form, check_table_name
from siltstone.store.checksums import PACKED_BYTES_MAX, PACKED_BYTES_MIN, pack, unpack
from siltstone.store.paths import check_object_name

MAGIC = b"SILTIDX1"
_FORMS = (Form.BASE, Form.DELTA)
_DIGEST_BYTES = 8
_NUMBER_MAX = (1 << 63) - 1
_ROWS_MAX = (1 << 32) - 1
FIELDS = ("form", "offset", "previous_checkpoint", "previous_entry")
"""the patent's four fields"""


@dataclass(frozen=True, eq=False)
class IndexEntry:
    """One table of one incremental variable in one checkpoint of one subtask.

    A delta is at `offset` of k.INCR and builds on entry `previous_entry` of the index of `previous_checkpoint`. A
    base is its own object, named `source`, from offset 0, and builds on nothing: both are 0. `length` is in bytes;
    `checksum` covers them. `digest` is the sum modulo 2**64 of the table's digests over the subtask's key groups.
    `key_group_offsets` is uint32[n + 1]: rows `[i]:[i + 1]` belong to key group `first_key_group + i`; for a base,
    whose file has its own order, it is [0]. `sqn` is the sequence number of the change: its step.
    """

    variable: str
    form: Form
    offset: int
    previous_checkpoint: int
    previous_entry: int
    length: int
    rows: int
    checksum: str
    digest: int
    source: str = ""
    first_key_group: int = 0
    key_group_offsets: np.ndarray = field(default_factory=lambda: np.zeros(1, np.uint32))
    sqn: int = 0


def encode_index(checkpoint: int, entries: Sequence[IndexEntry]) -> bytes:
    """Encode the index of one subtask at `checkpoint`.

    Raises:
        UsageError: a delta does not build on an earlier checkpoint, or a base has no object.
    """
    _check(checkpoint, entries)
    deltas = [i for i, entry in enumerate(entries) if entry.form == Form.DELTA]
    out = Encoder()
    out.varints([checkpoint, len(entries)])
    out.runs(_to_unsigned(_FORMS.index(entry.form) for entry in entries))
    out.runs(_to_zigzag(entry.offset - end for entry, end in zip(entries, _ends(entries), strict=True)))
    out.runs(_to_unsigned(checkpoint - entries[i].previous_checkpoint for i in deltas))
    out.runs(_to_zigzag(entries[i].previous_entry - i for i in deltas))
    out.texts([entry.variable for entry in entries])
    out.texts([entry.source for entry in entries if entry.form == Form.BASE])
    out.varints([entry.length for entry in entries])
    out.varints([entry.rows for entry in entries])
    checksums = [pack(entry.checksum) for entry in entries]
    out.runs(_to_unsigned(map(len, checksums)))
    out.raw(b"".join(checksums))
    out.raw(_to_unsigned(entry.digest for entry in entries).astype("<u8").tobytes())
    out.runs(_to_unsigned(entry.sqn for entry in entries))
    spreads = [len(entry.key_group_offsets) - 1 for entry in entries]
    out.runs(_to_unsigned(entry.first_key_group for entry in entries))
    out.runs(_to_unsigned(spreads))
    out.integers(np.concatenate([np.diff(e.key_group_offsets) for e in entries] or [[]]).astype(np.uint64))
    return seal(out.finish(), MAGIC)


def decode_index(data: Bytes, name: str = "an index") -> tuple[int, list[IndexEntry]]:
    """Decode (checkpoint, entries) that `encode_index` encoded.

    Raises:
        CorruptObject: cut, altered, or not an index; the message contains `name`.
    """
    with translate_decode_errors(name, "an index"):
        read = Decoder(unseal(data, MAGIC, name), name)
        checkpoint, count = read.count(), read.count()
        if count * (PACKED_BYTES_MIN + _DIGEST_BYTES) > len(data):
            raise read.damage_error(f"it is too short for {count} entries")
        four, _ = _read_fields(read, count)
        deltas = iter(zip(four["previous_checkpoint"].tolist(), four["previous_entry"].tolist(), strict=True))
        forms = [_FORMS[i] for i in four["form"].tolist()]
        variables = read.texts(count)
        objects = iter(read.texts(forms.count(Form.BASE)))
        lengths, rows = read.varints(count).tolist(), read.varints(count).tolist()
        checksums = _read_checksums(read, count)
        digests = np.frombuffer(read.raw(_DIGEST_BYTES * count), "<u8").tolist()
        sqns = read.runs(count).tolist()
        firsts, spreads = read.runs(count).tolist(), read.runs(count).tolist()
        if any(first + spread > KEY_GROUPS_MAX for first, spread in zip(firsts, spreads, strict=True)):
            raise read.damage_error("an entry has too many key groups")
        counts = np.split(read.integers(sum(spreads)), np.cumsum(spreads)[:-1])
        entries: list[IndexEntry] = []
        end = 0
        for i, form in enumerate(forms):
            delta = form == Form.DELTA
            back, shift = next(deltas) if delta else (checkpoint, -i)
            entry = IndexEntry(
                variable=variables[i],
                form=form,
                offset=end + int(four["offset"][i]) if delta else 0,
                previous_checkpoint=checkpoint - back,
                previous_entry=i + shift,
                length=lengths[i],
                rows=rows[i],
                checksum=checksums[i],
                digest=digests[i],
                source="" if delta else next(objects),
                first_key_group=firsts[i],
                key_group_offsets=np.cumsum(np.append(np.uint64(0), counts[i]), dtype=np.uint64).astype(np.uint32),
                sqn=sqns[i],
            )
            _check_decoded(entry, checkpoint, counts[i])
            end = entry.offset + entry.length if delta else end
            entries.append(entry)
        return checkpoint, entries


def field_bytes(data: Bytes) -> dict[str, int]:
    """Return the bytes that each of the patent's four fields takes in an encoded index, all entries together."""
    with translate_decode_errors("an index", "an index"):
        read = Decoder(unseal(data, MAGIC, "an index"), "an index")
        read.count()
        return _read_fields(read, read.count())[1]


def _read_fields(read: Decoder, count: int) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """Read the four columns as stored, and the bytes that each takes."""
    columns: dict[str, np.ndarray] = {}
    sizes = {}
    for name in FIELDS:
        before = read.position
        columns[name] = read.runs(int(columns["form"].sum()) if name.startswith("previous") else count)
        sizes[name] = read.position - before
        if name == "form" and (columns[name] >= len(_FORMS)).any():
            raise read.damage_error("an entry has no known form")
        if name in ("offset", "previous_entry"):
            columns[name] = unzigzag(columns[name])
    return columns, sizes


def _read_checksums(read: Decoder, count: int) -> list[str]:
    lengths = read.runs(count).tolist()
    if any(length > PACKED_BYTES_MAX for length in lengths):
        raise read.damage_error("a checksum is too long")
    return [unpack(bytes(read.raw(length))) for length in lengths]


def _check_decoded(entry: IndexEntry, checkpoint: int, counts: np.ndarray) -> None:
    """Check an entry's names and numbers; `counts` are its rows in each key group.

    Raises:
        ValueError, UsageError: they are not valid.
    """
    check_table_name(entry.variable)
    if max(entry.length, entry.rows, entry.sqn, entry.offset) > _NUMBER_MAX or entry.offset < 0:
        raise ValueError(f"entry {entry.variable} has numbers out of range")
    if entry.form == Form.BASE:
        check_object_name(entry.source)
    elif not 0 <= entry.previous_checkpoint < checkpoint or not 0 <= entry.previous_entry <= _NUMBER_MAX:
        raise ValueError(f"entry {entry.variable} does not build on an earlier checkpoint")
    if len(counts) and (counts.max() > entry.rows or int(counts.sum()) != entry.rows or entry.rows > _ROWS_MAX):
        raise ValueError(f"entry {entry.variable} has key groups that do not add up")


def _check(checkpoint: int, entries: Sequence[IndexEntry]) -> None:
    for entry in entries:
        what = f"entry {entry.variable} of checkpoint {checkpoint}"
        if entry.form == Form.DELTA and not (0 <= entry.previous_checkpoint < checkpoint and not entry.source):
            raise UsageError(f"{what} is a delta: it must be in the segment and build on an earlier checkpoint")
        if len(entry.key_group_offsets) > 1 and int(entry.key_group_offsets[-1]) != entry.rows:
            raise UsageError(f"{what} has {entry.rows} rows, but {entry.key_group_offsets[-1]} in its key groups")
        if entry.form == Form.BASE and (
            not entry.source or entry.offset or entry.previous_checkpoint or entry.previous_entry
        ):
            raise UsageError(f"{what} is a base: it must name its own object and build on nothing")


def _ends(entries: Sequence[IndexEntry]) -> list[int]:
    """Return where each entry's block is expected to begin: at the end of the last delta before it; 0 for a base."""
    ends, end = [], 0
    for entry in entries:
        ends.append(end if entry.form == Form.DELTA else 0)
        if entry.form == Form.DELTA:
            end = entry.offset + entry.length
    return ends


def _to_unsigned(values: object) -> np.ndarray:
    return np.array(list(values), dtype=np.uint64)  # type: ignore[call-overload]


def _to_zigzag(values: object) -> np.ndarray:
    return zigzag(np.array(list(values), dtype=np.int64))  # type: ignore[call-overload]
