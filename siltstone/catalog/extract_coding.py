"""Encode extracts and their parts (`extracts`), and decode them without trusting them.

    JSON list of base64 texts, together the packed JSON (`commit_details.pack_parts`) | xxh3-64 of what precedes

A row is an object by column. A column that a later revision adds is filled with its default; one that it removed would
need a format of its own here.
"""

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from datetime import datetime
from typing import Any

import xxhash
from sqlalchemy import Boolean, Column, Float, Integer, LargeBinary, String, Table

from siltstone.catalog.database.column_types import Json, PackedJson, UtcTime
from siltstone.catalog.records.commit_details import (
    check_stored,
    decode_steps,
    encode_steps,
    pack_parts,
    stored_to_json,
    unpack_parts,
)
from siltstone.catalog.records.extracts import TABLES, Extract, ReferenceCopy, Retained, StepPart
from siltstone.catalog.records.steps import Step, StepRecord
from siltstone.decoding import (
    check_flag,
    check_integer,
    check_object,
    check_text,
    check_time,
    parse_json,
    translate_decode_errors,
)
from siltstone.errors import CorruptObject, NewerFormat
from siltstone.model import MAX_EPOCH, MAX_ID, check_name

FORMAT = 1
_SEAL_BYTES = 8
_MAX = (1 << 63) - 1


def encode_extract(extract: Extract) -> bytes:
    """Encode an extract."""
    beginning = extract.beginning
    return seal_values(
        {
            "format": FORMAT,
            "stream": extract.stream,
            "epoch": extract.epoch,
            "number": extract.number,
            "rows": {name: [_row_to_json(TABLES[name], row) for row in rows] for name, rows in extract.rows.items()},
            "retained": [[*astuple(each)[:-1], each.committed_at.isoformat()] for each in extract.retained],
            "copies": [
                [c.checkpoint, c.rows, c.taken_at.isoformat(), c.epoch, [stored_to_json(o) for o in c.objects]]
                for c in extract.copies
            ],
            "oldest_step": extract.oldest_step,
            "logged": _records_to_json(extract.logged),
            "beginning": None if beginning is None else stored_to_json(beginning),
            "parts": [[stored_to_json(p.stored), p.steps, [list(r) for r in p.ranges]] for p in extract.parts],
        }
    )


def decode_extract(data: bytes, name: str) -> Extract:
    """Decode an extract, the object `name`.

    Raises:
        CorruptObject: it is cut or altered, or not an extract.
        NewerFormat: a newer Siltstone wrote it.
    """
    with translate_decode_errors(name, "an extract of the catalog"):
        values = unseal(data, name)
        stream = check_name("stream", values["stream"])
        rows = {
            table: [_row_from_json(TABLES[table], check_object(row, table)) for row in values["rows"][table]]
            for table in TABLES
        }
        if [row["name"] for row in rows["stream"]] != [stream]:
            raise ValueError("it is not of one stream")
        if any(row.get("stream", stream) != stream for of in rows.values() for row in of):
            raise ValueError("a row is of another stream")
        beginning = values["beginning"]
        return Extract(
            stream=stream,
            epoch=check_integer(values["epoch"], 0, MAX_EPOCH, "epoch"),
            number=check_integer(values["number"], 1, _MAX, "number"),
            rows=rows,
            retained=_decode_retained(values["retained"]),
            copies=tuple(_decode_copy(*each) for each in values["copies"]),
            oldest_step=check_integer(values["oldest_step"], 0, MAX_ID, "oldest_step"),
            logged=_records_from_json(values["logged"]),
            beginning=None if beginning is None else check_stored(*beginning),
            parts=tuple(_decode_part(*each) for each in values["parts"]),
        )


def encode_steps_part(steps: Sequence[StepRecord]) -> bytes:
    """Encode steps with their checkpoints."""
    return seal_values({"format": FORMAT, **_records_to_json(steps)})


def decode_steps_part(data: bytes, name: str) -> tuple[StepRecord, ...]:
    """Decode steps with their checkpoints, the object `name`.

    Raises:
        CorruptObject, NewerFormat: as `decode_extract`.
    """
    with translate_decode_errors(name, "a part of the input log"):
        return _records_from_json(unseal(data, name))


def encode_beginning(beginning: Step) -> bytes:
    """Encode step 0; equal steps have equal bytes."""
    return seal_values({"format": FORMAT, **encode_steps([beginning])})


def decode_beginning(data: bytes, name: str) -> Step:
    """Decode step 0, the object `name`.

    Raises:
        CorruptObject, NewerFormat: as `decode_extract`.
    """
    with translate_decode_errors(name, "the beginning of the input log"):
        [step] = decode_steps(unseal(data, name))
        return step


def seal(text: str) -> bytes:
    """Pack a JSON text, and add its checksum."""
    parts = pack_parts(text)
    body = json.dumps([base64.b64encode(part).decode() for part in parts]).encode()
    return body + xxhash.xxh3_64_digest(body)


def seal_values(values: Mapping[str, Any]) -> bytes:
    return seal(json.dumps(values, separators=(",", ":"), allow_nan=False))


def text_of(data: bytes) -> str:
    """Return the JSON text that `seal` packed, without checking its checksum.

    Raises:
        StateError, ValueError: it is damaged.
    """
    return unpack_parts([base64.b64decode(part, validate=True) for part in parse_json(data[:-_SEAL_BYTES])])


def unseal(data: bytes, name: str) -> Mapping[str, Any]:
    """Return the values that were sealed as the object `name`, with their `format`; call it where decode errors are
    translated.

    Raises:
        CorruptObject: it was cut or altered.
        NewerFormat: a newer Siltstone wrote it.
    """
    if xxhash.xxh3_64_digest(data[:-_SEAL_BYTES]) != data[-_SEAL_BYTES:]:
        raise CorruptObject(f"{name} was cut or altered: its checksum does not match")
    values = check_object(parse_json(text_of(data)), "it")
    if check_integer(values["format"], 1, _MAX, "format") > FORMAT:
        raise NewerFormat(f"{name} has format {values['format']}, which a newer Siltstone wrote: upgrade siltstone")
    return values


def _row_to_json(table: Table, row: Mapping[str, Any]) -> dict[str, Any]:
    return {column.key: _value_to_json(row[column.key]) for column in table.c}


def _value_to_json(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat()
    return base64.b64encode(value).decode() if isinstance(value, bytes) else value


def _row_from_json(table: Table, row: Mapping[str, Any]) -> dict[str, Any]:
    unknown = sorted(row.keys() - {column.key for column in table.c})
    if unknown:
        raise ValueError(f"table {table.name} has no column {unknown[0][:40]!r}")
    found = {}
    for column in table.c:
        if column.key not in row and (column.nullable or column.server_default is not None):
            continue
        value = row[column.key]
        if value is None and not column.nullable:
            raise ValueError(f"{table.name}.{column.key} is missing")
        found[column.key] = None if value is None else _value_from_json(column, value)
    return found


def _value_from_json(column: Column[Any], value: Any) -> Any:
    what, type_ = f"{column.table.name}.{column.key}", column.type
    if isinstance(type_, UtcTime):
        return check_time(value)
    if isinstance(type_, Json | PackedJson):
        return value if isinstance(value, list) else check_object(value, what)
    if isinstance(type_, LargeBinary):
        return base64.b64decode(check_text(value, what), validate=True)
    if isinstance(type_, Boolean):
        return check_flag(value, what)
    if isinstance(type_, Float):
        return float(value)
    if isinstance(type_, Integer):
        return check_integer(value, 0, _MAX, what)
    assert isinstance(type_, String), f"{what} has a type that an extract does not know"
    text = check_text(value, what)
    if type_.length is not None and len(text) > type_.length:
        raise ValueError(f"{what} has {len(text)} characters")
    return text


def _decode_retained(values: Sequence[Sequence[Any]]) -> tuple[Retained, ...]:
    found: list[Retained] = []
    for first, last, owner, epoch, marked, committed_at in values:
        check_integer(first, found[-1].last + 1 if found else 1, MAX_ID, "a checkpoint")
        check_integer(last, first, MAX_ID, "a checkpoint")
        check_integer(epoch, found[-1].epoch if found else 0, MAX_EPOCH, "epoch")
        flag = check_flag(marked, "a mark")
        found.append(Retained(first, last, check_name("stream", owner), epoch, flag, check_time(committed_at)))
    return tuple(found)


def _decode_copy(
    checkpoint: object, rows: object, taken_at: object, epoch: object, objects: Sequence[Sequence[object]]
) -> ReferenceCopy:
    return ReferenceCopy(
        check_integer(checkpoint, 1, MAX_ID, "a checkpoint"),
        check_integer(rows, 0, _MAX, "rows"),
        check_time(taken_at),
        check_integer(epoch, 0, MAX_EPOCH, "epoch"),
        tuple(check_stored(*each) for each in objects),
    )


def _decode_part(stored: Sequence[object], steps: object, ranges: Sequence[Sequence[object]]) -> StepPart:
    read = tuple(
        (check_integer(first, 1, MAX_ID, "a checkpoint"), check_integer(last, 1, MAX_ID, "a checkpoint"))
        for first, last in ranges
    )
    return StepPart(check_stored(*stored), check_integer(steps, 0, _MAX, "steps"), read)


def _records_to_json(steps: Sequence[StepRecord]) -> dict[str, Any]:
    return {**encode_steps(steps), "checkpoints": [step.checkpoint for step in steps]}


def _records_from_json(values: Mapping[str, Any]) -> tuple[StepRecord, ...]:
    values = check_object(values, "steps")
    steps = decode_steps(values)
    return tuple(
        StepRecord(
            *(s.step, s.batch_id, s.offsets, s.sources, s.kind, s.digests, s.clock),
            checkpoint=check_integer(checkpoint, 1, MAX_ID, "a checkpoint"),
        )
        for s, checkpoint in zip(steps, values["checkpoints"], strict=True)
    )
