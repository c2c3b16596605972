"""Small changes for a changelog, and what handles of them read back as."""

from collections.abc import Iterable, Sequence

import numpy as np
import pyarrow as pa

from siltstone.changelog.changes import Change, OpaqueChange, WholeTable
from siltstone.format.block import decode_block, encode_block
from siltstone.format.opaque import decode_opaque
from siltstone.format.segment import read_index
from siltstone.model import Form, Handle, KeyGroupRange, Kind, StoredObject
from siltstone.store.base import Store
from siltstone.store.blocks import BlockReader, Wanted

GROUPS = KeyGroupRange(4, 8)

Said = tuple[int, str, int | str]
"""sequence number, variable, and the value that the change says, or the object of a base"""


def delta(variable: str, value: int, rows: int = 1, groups: KeyGroupRange = GROUPS) -> Change:
    """Changes that all say `value`, their key groups as even as can be."""
    owners = np.sort(np.arange(rows) % len(groups) + groups.start).astype(np.uint16)
    return Change(variable, encode_block(pa.table({"v": [value] * rows}), owners), 0, 0, digest=value)


def opaque(variable: str, value: int, groups: KeyGroupRange = GROUPS) -> OpaqueChange:
    """A new value of an opaque variable."""
    return OpaqueChange(variable, {groups.start: str(value).encode()})


def base(variable: str, name: str) -> WholeTable:
    """A table in an object of this name, which nobody reads."""
    return WholeTable(variable, StoredObject(name, 7, "xxh3-128:" + "ab" * 16), rows=1, digest=0)


def value_of(handle: Handle, block: pa.Buffer) -> int:
    """What the change says that lies in this block."""
    if handle.kind is Kind.OPAQUE:
        [said] = decode_opaque(block, handle.object).values()
        return int(said)
    table, owners = decode_block(block, handle.object, handle.rows)
    assert all(group in handle.key_groups for group in owners.tolist())
    [said] = set(table.column(0).to_pylist())
    return said


def read(store: Store, handles: Iterable[Handle], objects: Iterable[StoredObject]) -> list[Said]:
    """What all handles but those of indexes say, in their order; each index agrees with the handles of tables,
    except about changes that a base of the same checkpoint replaces."""
    handles = list(handles)
    based = {h.variable: h.sqn for h in handles if _is_base(h)}
    own = [h for h in handles if not _is_base(h)]
    blocks = list(BlockReader(store, objects).blocks(map(Wanted, own)))
    for handle, block in zip(own, blocks, strict=True):
        if handle.kind is Kind.INDEX:
            kept = {(e.variable, e.sqn) for e in read_index(block) if e.sqn >= based.get(e.variable, 0)}
            assert kept <= {(h.variable, h.sqn) for h in handles}
    found: list[Said] = [(h.sqn, h.variable, h.object) for h in handles if _is_base(h)]
    data = zip(own, blocks, strict=True)
    return found + [(h.sqn, h.variable, value_of(h, block)) for h, block in data if h.kind is not Kind.INDEX]


def names(objects: Sequence[StoredObject]) -> list[str]:
    """The names of objects."""
    return [stored.name for stored in objects]


def _is_base(handle: Handle) -> bool:
    return handle.kind is Kind.INCREMENTAL and handle.form is Form.BASE
