"""`Bloom`: per key a set of values that may say yes by mistake, and never no. An example of a structure of one's own.

It is a `MapState` whose entries are the blocks of the filter: a change writes the block that it changes, and deltas,
digests, restores and rescales treat them as any map's. Everything that it uses is public (`docs/structures.md`).

A value's hash names one block of 512 bits and one bit in each of the block's eight words, so that a look-up reads one
entry (F. Putze, P. Sanders, J. Singler, "Cache-, hash- and space-efficient Bloom filters", 2007; the bits as in
Apache Parquet's split block filters, with words of 64 bits).
"""

import math
from typing import Any

import numpy as np
import pyarrow as pa

from siltstone.errors import UsageError
from siltstone.operator import MapState
from siltstone.state.hashing import xxhash64
from siltstone.state.ttl import TTL

BLOCK = "block"
WORDS = tuple(f"word{i}" for i in range(8))
_SALTS = np.array(
    [0x47B6137B, 0x44974D91, 0x8824AD5B, 0xA2B7289D, 0x705495C7, 0x2DF1424B, 0x9EFC4947, 0x5C6BFB31], np.uint32
)
"""odd numbers that choose the bits, those of Parquet's specification"""
_MOST_BLOCKS = 1 << 32


class Bloom(MapState):
    """Per key a Bloom filter: a set of values in little state, in which a value that was not added may seem to be.

        seen = st.Bloom({"page": pa.string()}, capacity=10_000)

        def process(self, rows, state):
            new = rows.filter(~state.seen.might_contain(rows.table))
            state.seen.add(new.table)

    Both calls take one table of the operator's key columns and those of the values; others are ignored. `add` adds each
    row's value to the filter of its key. `might_contain` returns bool[n]: True if a row's value was added. Of values
    that were not, `error` are True by mistake once the key has `capacity` values, and fewer before. More values only
    make more mistakes. Null is a value like others; 0.0 and -0.0 are equal, as are all NaN.

    State: an entry of 64 bytes for each block with a value. A filter of `error` 0.01 has about one per 50 values of
    `capacity`. With a `ttl`, a block lives until no value was added to it for that long: a value stays for at least
    that time, and longer if others share its block.

    Args:
        values: the columns of a value, `{name: type}`.
        capacity: how many values a key has.
        error: the share of mistakes then.
        ttl: see `MapState`.

    Raises:
        UsageError: an argument is wrong.
    """

    def __init__(
        self, values: dict[str, pa.DataType] | pa.Schema, capacity: int, error: float = 0.01, *, ttl: TTL | None = None
    ) -> None:
        super().__init__(key={BLOCK: pa.int64()}, value=dict.fromkeys(WORDS, pa.uint64()), ttl=ttl)
        if type(capacity) is not int or capacity < 1:
            raise UsageError(f"the capacity of a Bloom filter is {capacity!r}: use a number of values, at least 1")
        if not isinstance(error, int | float) or not 1e-6 <= error <= 0.5:
            raise UsageError(f"the error of a Bloom filter is {error!r}: use a share from 0.000001 to 0.5")
        try:
            self.values: pa.Schema = pa.schema(values)
            xxhash64([pa.array([], kind) for kind in self.values.types])
        except (TypeError, pa.ArrowInvalid) as wrong:
            raise UsageError(f"the values of a Bloom filter are columns as of a key, {{name: type}}: {wrong}") from None
        self.blocks: int = max(1, math.ceil(capacity / _find_load(error)))
        if self.blocks > _MOST_BLOCKS:
            raise UsageError(f"a Bloom filter of {capacity:,} values has {self.blocks:,} blocks: use a lower capacity")

    def layout(self) -> str:
        columns = ", ".join(f"{field.name} {field.type}" for field in self.values)
        return f"Bloom ({self.blocks} blocks, {columns})"

    def bind(self, name: str, state: Any) -> "BloomAccess":
        return BloomAccess(name, super().bind(name, state), self)


class BloomAccess:
    """The filters of many keys: `state.<variable>` of a `Bloom`."""

    def __init__(self, name: str, blocks: Any, variable: Bloom) -> None:
        self._name, self._blocks, self._variable = name, blocks, variable

    def add(self, entries: pa.Table) -> None:
        """Add each row's value to the filter of its key."""
        entries, bits = self._locate(entries)
        if not len(bits):
            return
        distinct, index = self._blocks.group(entries)
        order = np.argsort(index, kind="stable")
        starts = np.searchsorted(index[order], np.arange(distinct.num_rows))
        before = self._read(distinct)
        after = before | np.bitwise_or.reduceat(bits[order], starts, axis=0)
        if self._variable.ttl is None:  # else writing it again is what renews it
            changed = (after != before).any(axis=1)
            distinct, after = distinct.filter(pa.array(changed)), after[changed]
        for name, word in zip(WORDS, after.T, strict=True):
            distinct = distinct.append_column(name, pa.array(word))
        self._blocks.put(distinct)

    def might_contain(self, entries: pa.Table) -> np.ndarray:
        """Return bool[n]: whether each row's value may be in the filter of its key."""
        entries, bits = self._locate(entries)
        return (self._read(entries) & bits == bits).all(axis=1)

    def _read(self, entries: pa.Table) -> np.ndarray:
        """Return the words of blocks (uint64[n, 8]), 0 where there is none."""
        found = self._blocks.get(entries)
        return np.stack([found[name].fill_null(0).to_numpy() for name in WORDS], axis=1)

    def _locate(self, entries: pa.Table) -> tuple[pa.Table, np.ndarray]:
        """Return the blocks of rows, as entries of the map, and the bits of their values (uint64[n, 8])."""
        try:
            columns = [entries[field.name].cast(field.type) for field in self._variable.values]
        except (KeyError, pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise UsageError(f"{self._name}: the values do not fit {self._variable.values}: {error}") from None
        hashes = xxhash64(columns)
        high, low = hashes >> np.uint64(32), hashes.astype(np.uint32)
        block = (high * np.uint64(self._variable.blocks)) >> np.uint64(32)
        places = (low[:, None] * _SALTS) >> np.uint32(26)
        own = entries.drop_columns([name for name in (BLOCK, *WORDS) if name in entries.column_names])
        return own.append_column(BLOCK, pa.array(block.astype(np.int64))), np.uint64(1) << places.astype(np.uint64)


def _find_load(error: float) -> float:
    """Return how many values per block make this share of mistakes, the number in a block being Poisson-distributed."""
    low, high = 0.0, 1024.0
    for _ in range(60):
        load = (low + high) / 2
        count = np.arange(1, int(load + 12 * math.sqrt(load)) + 20)
        chance = np.exp(count * math.log(load) - load - np.cumsum(np.log(count)))
        mistakes = float((chance * (1 - (63 / 64) ** count) ** len(WORDS)).sum())
        low, high = (load, high) if mistakes < error else (low, load)
    return low
