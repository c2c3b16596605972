"""Hypothesis strategies for Arrow columns of every type that a state table may have."""

import datetime as dt
from decimal import Decimal
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import strategies as st

SIGNED = [pa.int8(), pa.int16(), pa.int32(), pa.int64()]
UNSIGNED = [pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()]
FLOATS = [pa.float32(), pa.float64()]
DECIMALS = [pa.decimal128(1, 0), pa.decimal128(18, 4), pa.decimal128(19, 0), pa.decimal128(38, 10)]
OTHERS = [pa.bool_(), pa.string(), pa.binary(), pa.date32(), pa.timestamp("us", "UTC"), pa.timestamp("us")]
TYPES = [*SIGNED, *UNSIGNED, *FLOATS, *DECIMALS, *OTHERS]

_ODD_NANS = [float(np.uint64(bits).view(np.float64)) for bits in (0x7FF8000000000001, 0xFFF8000000000000)]


def values(kind: pa.DataType) -> st.SearchStrategy[Any]:
    """Python values of one type, its edges among them."""
    if pa.types.is_integer(kind):
        low = 0 if pa.types.is_unsigned_integer(kind) else -(2 ** (kind.bit_width - 1))
        high = low + 2**kind.bit_width - 1
        return st.one_of(st.integers(low, high), st.sampled_from([low, high, 0, 1]))
    if pa.types.is_floating(kind):
        edges = st.sampled_from([0.0, -0.0, float("nan"), float("inf"), -float("inf"), *_ODD_NANS])
        return st.one_of(st.floats(width=kind.bit_width), edges)
    if pa.types.is_decimal(kind):
        limit = 10**kind.precision - 1
        unscaled = st.one_of(st.integers(-limit, limit), st.sampled_from([0, 1, -1, limit, -limit]))
        return unscaled.map(lambda n: Decimal((int(n < 0), Decimal(n).as_tuple().digits, -kind.scale)))
    if pa.types.is_timestamp(kind):
        zone = st.just(dt.UTC) if kind.tz else st.none()
        return st.datetimes(dt.datetime(1900, 1, 1), dt.datetime(2200, 1, 1), timezones=zone)
    plain: dict[pa.DataType, st.SearchStrategy[Any]] = {
        pa.bool_(): st.booleans(),
        pa.string(): st.text(st.characters(codec="utf-8"), max_size=80),
        pa.binary(): st.binary(max_size=80),
        pa.date32(): st.dates(dt.date(1900, 1, 1), dt.date(2200, 1, 1)),
    }
    return plain[kind]


def arrays(kind: pa.DataType, size: int, *, nulls: bool = True) -> st.SearchStrategy[pa.Array]:
    """Arrays of one type and size, some of them slices of larger ones."""
    element = st.one_of(st.none(), values(kind)) if nulls else values(kind)
    whole = st.lists(element, min_size=size + 1, max_size=size + 1).map(lambda v: pa.array(v, kind))
    return st.tuples(whole, st.sampled_from([0, 1])).map(lambda pair: pair[0].slice(pair[1], size))


@st.composite
def tables(draw: st.DrawFn, *, nulls: bool = True, max_columns: int = 4, max_rows: int = 12) -> pa.Table:
    """Tables of one to `max_columns` columns named c0, c1, ..."""
    size = draw(st.integers(0, max_rows))
    kinds = draw(st.lists(st.sampled_from(TYPES), min_size=1, max_size=max_columns))
    return pa.table({f"c{i}": draw(arrays(kind, size, nulls=nulls)) for i, kind in enumerate(kinds)})


def random_array(random: Random, kind: pa.DataType, size: int) -> pa.Array:
    """A large array for tests too dear to run once an example: a tenth nulls, a tenth small, the rest
    anything."""

    def one() -> Any:
        if pa.types.is_integer(kind):
            low = 0 if pa.types.is_unsigned_integer(kind) else -(2 ** (kind.bit_width - 1))
            return random.choice([low, low + 2**kind.bit_width - 1, random.randrange(low, low + 2**kind.bit_width)])
        if pa.types.is_floating(kind):
            return random.choice([0.0, -0.0, *_ODD_NANS, float("inf"), random.gauss(0, 1), random.gauss(0, 1e30)])
        if pa.types.is_decimal(kind):
            unscaled = random.randrange(10 ** random.randint(1, kind.precision))
            return Decimal((random.randint(0, 1), Decimal(unscaled).as_tuple().digits, -kind.scale))
        if pa.types.is_date32(kind):
            return dt.date(1900, 1, 1) + dt.timedelta(random.randrange(100_000))
        if pa.types.is_timestamp(kind):
            start = dt.datetime(1900, 1, 1, tzinfo=dt.UTC if kind.tz else None)
            return start + dt.timedelta(microseconds=random.randrange(10**16))
        if pa.types.is_string(kind):
            return "".join(random.choices("ab\0é漢😀", k=random.randint(0, 60)))
        return random.randbytes(random.randint(0, 120)) if pa.types.is_binary(kind) else random.random() < 0.5

    return pa.array([None if random.random() < 0.1 else one() for _ in range(size)], kind)
