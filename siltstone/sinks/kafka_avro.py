"""Rows as Avro: the schema that follows from Arrow's, and each row as a bare binary datum.

A datum has no header and no id of a schema, like those that Spark's `to_avro` makes and `from_avro` reads. Readers need
the schema (`avro_schema`).

Encoding goes column by column down to the leaves. Times and dates reach fastavro as integers, and decimals as bytes, so
that no value has to be one of Python's, whose years end at 9999.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BytesIO
from itertools import pairwise
from typing import Any

import pyarrow as pa

from siltstone.errors import StateError, UsageError
from siltstone.extras import check_extra
from siltstone.state.columns import find_broken
from siltstone.state.json_rows import describe_broken

EXTRA = ("kafka", "fastavro", "a KafkaSink with format='avro'")
"""as `extras.check_extra` takes it"""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SIMPLE = {
    pa.bool_(): "boolean",
    **dict.fromkeys((pa.int8(), pa.int16(), pa.int32(), pa.uint8(), pa.uint16()), "int"),
    **dict.fromkeys((pa.int64(), pa.uint32()), "long"),
    **dict.fromkeys((pa.float16(), pa.float32()), "float"),
    pa.float64(): "double",
    **dict.fromkeys((pa.string(), pa.large_string(), pa.string_view()), "string"),
    **dict.fromkeys((pa.binary(), pa.large_binary(), pa.binary_view()), "bytes"),
    pa.uint64(): {"type": "bytes", "logicalType": "decimal", "precision": 20, "scale": 0},
    pa.date32(): {"type": "int", "logicalType": "date"},
    pa.time32("s"): {"type": "int", "logicalType": "time-millis"},
    pa.time32("ms"): {"type": "int", "logicalType": "time-millis"},
    pa.time64("us"): {"type": "long", "logicalType": "time-micros"},
}
_ADVICE = (
    (lambda kind: pa.types.is_timestamp(kind) and kind.unit == "ns", "declare timestamp[us], for Avro has no ns"),
    (pa.types.is_time, "declare time64[us], for Avro has no ns"),
    (pa.types.is_date64, "declare date32, or timestamp[ms] if it has a time of day"),
    (pa.types.is_duration, "declare int64, such as microseconds"),
    (pa.types.is_map, "declare a map with keys of text, or a list of structs"),
    (pa.types.is_decimal, "declare a decimal whose scale is from 0 to its precision"),
)


def avro_schema(schema: pa.Schema, name: str = "siltstone.Value") -> dict[str, Any]:
    """Return the Avro schema of rows, as the JSON object that readers need (`json.dumps`).

    Every field is a union with null, whose default is null.

    Args:
        schema: the rows' columns.
        name: the full name of the record. Those of structs begin with it.

    Raises:
        UsageError: Avro does not have a name, or a type; the message says which, and what to use.
    """
    if not all(map(_NAME.fullmatch, name.split("."))):
        raise UsageError(f"the name {name!r} is not one of Avro: use letters, digits and '_', with '.' between parts")
    return _Definitions(name).record(list(schema), ())


@dataclass(frozen=True)
class AvroFormat:
    """Keys and values of one sink as Avro.

    Attributes:
        what: the sink, as errors call it.
        stream, operator: their names are in the namespace of the records, `siltstone.<stream>.<operator>`.
    """

    what: str
    stream: str
    operator: str

    def check(self, schema: pa.Schema, columns: str | Sequence[str], part: str) -> None:
        """Check that rows of this schema can be written.

        Args:
            columns: those that are written: one by itself, or several as a record.
            part: "Key" or "Value", the record's name.

        Raises:
            UsageError: fastavro is missing, or Avro has not a name or a type of theirs.
        """
        check_extra(*EXTRA)
        self.make_schema(schema, columns, part)

    def encode(self, rows: pa.Table, columns: str | Sequence[str], part: str) -> list[bytes | None]:
        """Encode each row; arguments as of `check`. A null of one column is None.

        Raises:
            UsageError: as `check`.
            StateError: text that is not UTF-8, or another value that is not of its type.
        """
        record = self.make_schema(rows.schema, columns, part)
        named = [columns] if isinstance(columns, str) else list(columns)
        made = []
        for name, each in zip(named, record["fields"], strict=True):
            with self._name_column(name):
                made.append(_field_values(self._whole(rows.column(name), name), each["type"]))
        if isinstance(columns, str):
            found = [None if value is None else {"only": value} for value in made[0]]
        else:
            found = _join_fields(named, made, rows.num_rows)
        return _write(found, record)

    def make_schema(self, schema: pa.Schema, columns: str | Sequence[str], part: str) -> dict[str, Any]:
        """Return the schema by which rows are written; arguments as of `check`.

        One column by itself is a record, too, with a field that is never null: its bytes are those of the field, and
        only a record's schema is parsed once for all rows.

        Raises:
            UsageError: Avro has not a name or a type.
        """
        namespace = f"siltstone.{_clean(self.stream)}.{_clean(self.operator)}"
        try:
            if not isinstance(columns, str):
                return avro_schema(pa.schema([schema.field(name) for name in columns]), f"{namespace}.{part}")
            kind = _Definitions(f"{namespace}.{part}", columns).type(schema.field(columns).type, ())
        except UsageError as error:
            raise UsageError(f"{self.what}: {error}") from None
        return {"type": "record", "name": f"{namespace}.Of{part}", "fields": [{"name": "only", "type": kind}]}

    def _whole(self, column: pa.ChunkedArray, name: str) -> pa.Array:
        broken = find_broken(column)
        if broken.any():
            raise StateError(
                f"{self.what}: column {name} {describe_broken(column, broken)}, which Avro does not have",
                advice="declare it as binary, or correct it in the operator, and run again",
            )
        return column.combine_chunks()

    @contextmanager
    def _name_column(self, name: str) -> Iterator[None]:
        """Say in errors of a `with` block which column has the value that cannot be encoded."""
        try:
            yield
        except pa.ArrowInvalid as error:
            raise StateError(
                f"{self.what}: column {name} has a value that Avro does not have: {error}",
                advice="declare another type, or correct it in the operator, and run again",
            ) from None


@dataclass
class _Definitions:
    """Makes the types of one schema.

    Attributes:
        root: the full name of the record, and what the names of records and fixed types in it begin with.
        column: the column whose type is made, for errors; "" for a record of columns.
    """

    root: str
    column: str = ""
    taken: set[str] = field(default_factory=set)

    def record(self, fields: Sequence[pa.Field], path: tuple[str, ...]) -> dict[str, Any]:
        """Return the type of a row, or of a struct.

        Args:
            path: the names of the fields that lead to it.
        """
        name, made, seen = self._name(path), [], set[str]()
        for each in fields:
            here = (*path, each.name)
            what = f"column {self._show(here)}"
            if not _NAME.fullmatch(each.name):
                raise UsageError(
                    f"{what} has a name that Avro does not have: rename it with letters, digits and '_', not beginning "
                    "with a digit"
                )
            if each.name in seen:
                raise UsageError(f"{what} is there twice: rename one")
            seen.add(each.name)
            made.append({"name": each.name, "type": ["null", self.type(each.type, here)], "default": None})
        return {"type": "record", "name": name, "fields": made}

    def type(self, kind: pa.DataType, path: tuple[str, ...]) -> Any:
        """Return the type of values that are not null; `path` as of `record`."""
        types = pa.types
        if kind in _SIMPLE:
            simple = _SIMPLE[kind]
            return dict(simple) if isinstance(simple, dict) else simple
        if types.is_dictionary(kind):
            return self.type(kind.value_type, path)
        if types.is_fixed_size_binary(kind):
            return {"type": "fixed", "name": self._name(path), "size": kind.byte_width}
        if types.is_decimal(kind) and 0 <= kind.scale <= kind.precision:
            return {"type": "bytes", "logicalType": "decimal", "precision": kind.precision, "scale": kind.scale}
        if types.is_timestamp(kind) and kind.unit != "ns":
            local, unit = "" if kind.tz else "local-", "micros" if kind.unit == "us" else "millis"
            return {"type": "long", "logicalType": f"{local}timestamp-{unit}"}
        if types.is_struct(kind):
            return self.record(list(kind), path)
        if _is_list(kind):
            return {"type": "array", "items": ["null", self.type(kind.value_type, path)]}
        if types.is_map(kind) and _is_text(kind.key_type):
            return {"type": "map", "values": ["null", self.type(kind.item_type, path)]}
        advice = next((said for matches, said in _ADVICE if matches(kind)), "declare another type")
        raise UsageError(f"column {self._show(path)} has type {kind}, which cannot be Avro: {advice}")

    def _show(self, path: tuple[str, ...]) -> str:
        return ".".join((self.column, *path) if self.column else path)

    def _name(self, path: tuple[str, ...]) -> str:
        """Return a name that no other type has: the paths `a_b` and `a`, `b` make the same."""
        plain = name = "_".join((self.root, *path))
        number = 1
        while name in self.taken:
            number += 1
            name = f"{plain}_{number}"
        self.taken.add(name)
        return name


def _write(rows: Sequence[dict[str, Any] | None], record: dict[str, Any]) -> list[bytes | None]:
    from fastavro import parse_schema, schemaless_writer

    schema, out, ends = parse_schema(record), BytesIO(), [0]
    for row in rows:
        if row is not None:
            schemaless_writer(out, schema, row)
        ends.append(out.tell())
    data = out.getvalue()
    return [None if row is None else data[start:end] for row, (start, end) in zip(rows, pairwise(ends), strict=True)]


def _field_values(array: pa.Array, made: Any) -> list[Any]:
    """Convert values to those that fastavro writes as a type, which may be a union with null."""
    if not isinstance(made, list):
        return _values(array, made)
    kind = made[1]
    # So fastavro is told which branch they are of. Else it would try each branch, with all that is in the value.
    branch = kind.get("name", kind["type"]) if isinstance(kind, dict) else kind
    return [None if value is None else (branch, value) for value in _values(array, kind)]


def _values(array: pa.Array, made: Any) -> list[Any]:
    """Convert values to those that fastavro writes as a type; null becomes None."""
    types, kind = pa.types, array.type
    if types.is_dictionary(kind):
        return _values(array.dictionary_decode(), made)
    if types.is_struct(kind):
        fields = made["fields"]
        columns = [_field_values(each, f["type"]) for each, f in zip(array.flatten(), fields, strict=True)]
        names = [f["name"] for f in fields]
        return _without_nulls(array, _join_fields(names, columns, len(array)))
    if types.is_map(kind):
        (keys, values), spans = _elements(array, [array.keys, array.items])
        texts, items = _values(keys, "string"), _field_values(values, made["values"])
        found = [dict(zip(texts[start:end], items[start:end], strict=True)) for start, end in spans]
        if any(len(each) < end - start for each, (start, end) in zip(found, spans, strict=True)):
            raise pa.ArrowInvalid("a map with a key twice")
        return _without_nulls(array, found)
    if _is_list(kind):
        if types.is_fixed_size_list(kind):
            array = array.cast(pa.large_list(kind.value_type))
        [inner], spans = _elements(array, [array.values])
        items = _field_values(inner, made["items"])
        return _without_nulls(array, [items[start:end] for start, end in spans])
    return _leaf_values(array)


def _leaf_values(array: pa.Array) -> list[Any]:
    types, kind = pa.types, array.type
    if types.is_uint64(kind):
        return [None if n is None else _to_bytes(n) for n in array.to_pylist()]
    if types.is_decimal(kind):
        words = array.view(pa.binary(kind.byte_width)).to_pylist()
        return [None if word is None else _to_bytes(int.from_bytes(word, "little", signed=True)) for word in words]
    if types.is_float16(kind):
        array = array.cast(pa.float32())
    elif types.is_timestamp(kind):
        unit = "us" if kind.unit == "us" else "ms"
        array = array.cast(pa.timestamp(unit, kind.tz)).cast(pa.int64())
    elif types.is_time32(kind):
        array = array.cast(pa.time32("ms")).cast(pa.int32())
    elif types.is_time64(kind):
        array = array.cast(pa.int64())
    elif types.is_date32(kind):
        array = array.cast(pa.int32())
    return array.to_pylist()


def _join_fields(names: Sequence[str], columns: Sequence[list[Any]], count: int) -> list[dict[str, Any]]:
    rows = zip(*columns, strict=True) if columns else [()] * count
    return [dict(zip(names, row, strict=True)) for row in rows]


def _elements(array: pa.Array, children: Sequence[pa.Array]) -> tuple[list[pa.Array], list[tuple[int, int]]]:
    """Return the elements that a list or map array refers to, and where in them those of each value are."""
    starts = array.offsets.to_pylist()
    if pa.types.is_list_view(array.type) or pa.types.is_large_list_view(array.type):
        spans = [(start, start + size) for start, size in zip(starts, array.sizes.to_pylist(), strict=True)]
    else:
        spans = list(pairwise(starts))
    first = min((start for start, _ in spans), default=0)
    last = max((end for _, end in spans), default=0)
    return [child.slice(first, last - first) for child in children], [(a - first, b - first) for a, b in spans]


def _without_nulls(array: pa.Array, values: list[Any]) -> list[Any]:
    if not array.null_count:
        return values
    return [value if valid else None for value, valid in zip(values, array.is_valid().to_pylist(), strict=True)]


def _to_bytes(n: int) -> bytes:
    """Return the shortest two's complement, its first byte the highest: an unscaled decimal of Avro."""
    return n.to_bytes((n if n >= 0 else ~n).bit_length() // 8 + 1, "big", signed=True)


def _is_list(kind: pa.DataType) -> bool:
    types = pa.types
    return (
        types.is_list(kind)
        or types.is_large_list(kind)
        or types.is_fixed_size_list(kind)
        or types.is_list_view(kind)
        or types.is_large_list_view(kind)
    )


def _is_text(kind: pa.DataType) -> bool:
    return _SIMPLE.get(kind.value_type if pa.types.is_dictionary(kind) else kind) == "string"


def _clean(name: str) -> str:
    """Return a part of a name of Avro for the name of a stream or an operator."""
    cleaned = re.sub(r"[^A-Za-z0-9_]", "_", name)
    return cleaned if _NAME.fullmatch(cleaned) else f"_{cleaned}"
