"""Decode a manifest without trusting it: every name, number and length is checked here, once.

Names become parts of object names and paths; numbers become sizes of arrays and byte ranges. Users of a manifest may
rely on this: definitions, digests, versions and forms name the same operators and variables, each handle's variable is
among them, key groups are within `max_parallelism`, each digest has one number per key group, and a materialization has
one base for each key group of every variable that it has.
"""

import base64
import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash
import zstandard

from siltstone.decoding import (
    check_integer,
    check_object,
    decoded_bytes_max,
    json_bytes_max,
    parse_json,
    translate_decode_errors,
)
from siltstone.errors import CorruptObject, NewerFormat
from siltstone.format.arrow import read_batch, read_batches
from siltstone.format.manifest import ABOUT, COMPRESSION, FORMAT, HEAD, SCHEMA, SEAL_BYTES, Manifest
from siltstone.model import (
    MAX_ID,
    MAX_MAX_PARALLELISM,
    MAX_NUMBER,
    Form,
    Handle,
    KeyGroupRange,
    Kind,
    RangeChecksums,
    StoredObject,
    check_name,
    check_table_name,
)
from siltstone.state.schema import TableSchema
from siltstone.store.checksums import unpack
from siltstone.store.paths import CheckpointPath, check_attempt, check_object_name, is_row_file

_PART_BYTES = 512
"""approximate memory of a handle, an object or a digest, without its numbers"""
_ALGORITHM_CHARACTERS = 32


def decode_manifest(data: bytes | memoryview | pa.Buffer, name: str = "a manifest") -> Manifest:
    """Decode a manifest that `encode_manifest` encoded.

    Raises:
        CorruptObject: cut, altered, or not a manifest; the message contains `name`.
        NewerFormat: it is intact, but a newer Siltstone wrote it.
    """
    with translate_decode_errors(name, "a manifest"):
        view = memoryview(data).cast("B")
        body = view[:-SEAL_BYTES]
        if xxhash.xxh3_64_digest(body) != bytes(view[-SEAL_BYTES:]):
            raise CorruptObject(f"{name} was cut or altered: its checksum does not match")
        [head] = read_batches(body)
        said = _read_head(head, len(view))
        _check_format(said["format"], name)  # before anything that a newer format may have changed
        if not head.schema.equals(HEAD):
            raise ValueError("its head is not that of a manifest")
        row = body[-check_integer(said["row"], 1, len(body), "length of its row") :]
        batch = read_batch(_decompress(row, said["compression"]), SCHEMA, decoded_bytes_max(len(row)))
        about = _read_head(batch, len(view))
        handles, objects, digests = (_structs(batch.column(i)) for i in (1, 2, 3))
        if _PART_BYTES * (len(handles) + len(objects) + len(digests)) > decoded_bytes_max(len(view)):
            raise ValueError(f"it claims {len(handles)} handles, {len(objects)} objects and {len(digests)} digests")
        return _manifest(about, handles, objects, digests)


def _read_head(batch: pa.RecordBatch, stored_bytes: int) -> Mapping[str, Any]:
    """Return the JSON of the one row."""
    if batch.num_rows != 1 or batch.schema.field(0) != HEAD.field(0) or batch.column(0).null_count:
        raise ValueError("it is not one row that begins with a text")
    if batch.column(0).nbytes > json_bytes_max(stored_bytes):
        raise ValueError(f"it has {batch.column(0).nbytes} bytes of JSON")
    return check_object(parse_json(batch.column(0)[0].as_py()), "what it says of itself")


def _decompress(row: memoryview, compression: object) -> memoryview | bytes:
    """Return the row's message, which takes no more memory than its bytes pay for."""
    if compression not in ("", COMPRESSION):
        raise ValueError(f"its compression is {str(compression)[:40]!r}")
    if not compression:
        return row
    size = zstandard.frame_content_size(row)
    if not 0 <= size <= decoded_bytes_max(len(row)):
        raise ValueError(f"its row of {len(row)} bytes would become {size}")
    return zstandard.ZstdDecompressor().decompress(row, max_output_size=size, allow_extra_data=False)


def _check_format(number: object, name: str) -> None:
    if type(number) is int and number > FORMAT:
        raise NewerFormat(f"{name} has format {number}, which a newer Siltstone wrote: upgrade siltstone")
    if type(number) is not int or number < 1:
        raise CorruptObject(f"{name} has format {str(number)[:40]}, which never existed")


def _structs(column: pa.Array) -> pa.StructArray:
    """Return the structs of a column's one list, after checking that all fields have values."""
    structs = column.flatten()
    if column.null_count or structs.null_count or any(field.null_count for field in structs.flatten()):
        raise ValueError("a value is missing")
    return structs


def _columns(structs: pa.StructArray) -> dict[str, list[Any]]:
    """Return field -> its values; equal texts share one object, since most are equal."""
    seen: dict[str, str] = {}
    columns = {}
    for field, values in zip(structs.type, structs.flatten(), strict=True):
        plain = values.to_pylist()
        columns[field.name] = [seen.setdefault(v, v) for v in plain] if pa.types.is_string(field.type) else plain
    return columns


def _manifest(
    about: Mapping[str, Any], handles: pa.StructArray, objects: pa.StructArray, digests: pa.StructArray
) -> Manifest:
    path = CheckpointPath(
        about["stream"],
        check_integer(about["epoch"], 0, MAX_NUMBER, "epoch"),
        check_integer(about["checkpoint"], 1, MAX_ID, "checkpoint"),
    )
    check_integer(about["step"], 0, MAX_ID, "step")
    max_parallelism = check_integer(about["max_parallelism"], 1, MAX_MAX_PARALLELISM, "max_parallelism")
    forms = {op: Form(form) for op, form in _by_operator(about, "forms").items()}
    operators = _by_operator(about, "operators")
    known = decode_variables(operators)
    for operator, number in _by_operator(about, "d").items():
        check_integer(number, 0, MAX_NUMBER, f"d of {operator}")
    for operator, tables in _by_operator(about, "chains").items():
        for table, chain in check_object(tables, f"chains of {operator}").items():
            check_table_name(table)
            of = f"the chain of {operator}.{table}"
            check_integer(check_object(chain, of)["first"], 1, path.checkpoint, f"first of {of}")
            check_numbers(chain, of)
    statistics = check_object(about["statistics"], "statistics")
    if not about["materialization"]:
        check_statistics(statistics, operators, max_parallelism)
    else:
        check_attempt(about["materialization"])
        if len(operators) != 1:
            raise ValueError("a materialization is of one operator")
    read = _digests(digests, forms, max_parallelism)
    found = Manifest(
        **{key: about[key] for key in ABOUT if key not in ("forms", "versions")},
        forms=forms,
        handles=list(_handles(handles, known, read, max_parallelism, path.checkpoint)),
        objects=list(_objects(objects, check_object(about["ranges"], "ranges"))),
        digests=read,
        event_time_max=_time(about["event_time_max"]),
        versions=_versions(about["versions"], known, max_parallelism, path.checkpoint),
        commit=tuple(base64.b64decode(part, validate=True) for part in about["commit"]),
    )
    if mismatch := found.find_mismatch():
        raise ValueError(mismatch)
    if found.materialization:
        if found.versions or found.commit:
            raise ValueError("a materialization has versions or details of a commit")
        _check_bases(found.handles, max_parallelism)
    return found


def _check_bases(handles: Iterable[Handle], max_parallelism: int) -> None:
    """Check that a materialization leaves nothing of its variables to what it replaces.

    A restore takes its handles instead of all of the checkpoint's own of these variables (`Manifest.with_bases`), and
    a proof takes them where they are (`LiveHandles`).
    """
    upto: dict[str, int] = {}
    for handle in sorted(handles, key=lambda h: (h.variable, h.key_groups)):
        if handle.form is not Form.BASE or handle.kind is Kind.INDEX:
            raise ValueError(f"a materialization has a {handle.form} of {handle.kind} {handle.variable}")
        if handle.key_groups.start != upto.setdefault(handle.variable, 0):
            raise ValueError(f"the bases of {handle.variable} do not hold each key group once")
        upto[handle.variable] = handle.key_groups.end
    for variable in (variable for variable, end in upto.items() if end != max_parallelism):
        raise ValueError(f"the bases of {variable} end before key group {max_parallelism}")


def _by_operator(about: Mapping[str, Any], what: str) -> Mapping[str, Any]:
    found = check_object(about[what], what)
    for operator in found:
        check_name("operator", operator)
    return found


def decode_variables(operators: Mapping[str, Any]) -> dict[str, dict[str, Kind]]:
    """Return operator -> its tables and opaque variables, from the definitions.

    Raises:
        ValueError, KeyError, SiltstoneError: the definitions are damaged.
    """
    found: dict[str, dict[str, Kind]] = {}
    for operator, definition in operators.items():
        own = found.setdefault(operator, {})
        key = check_object(definition, f"operator {operator}")["key"]
        TableSchema.from_json({"key": key, "subkey": [], "value": []})
        for variable, shape in check_object(definition["variables"], f"variables of {operator}").items():
            tables = check_object(check_object(shape, variable)["tables"], f"tables of {variable}")
            for table, schema in tables.items():
                TableSchema.from_json(check_object(schema, table))
                own[check_table_name(table)] = Kind.INCREMENTAL
            if not tables:
                own[check_name("variable", variable)] = Kind.OPAQUE
    return found


def _versions(
    plain: object, known: Mapping[str, Mapping[str, Kind]], max_parallelism: int, checkpoint: int
) -> dict[str, dict[str, list[tuple[int, int]]]]:
    found: dict[str, dict[str, list[tuple[int, int]]]] = {}
    for operator, variables in check_object(plain, "versions").items():
        own = found.setdefault(check_name("operator", operator), {})
        for variable, runs in check_object(variables, f"versions of {operator}").items():
            if variable not in known.get(operator, {}) or not isinstance(runs, list):
                raise ValueError(f"the versions of {operator} are not of its variables")
            own[variable] = []
            upto = -1
            for first, at in runs:
                upto = check_integer(first, upto + 1, max_parallelism - 1, "first key group of a version")
                own[variable].append((upto, check_integer(at, 0, checkpoint, "checkpoint of a version")))
    return found


def _digests(parts: pa.StructArray, forms: Iterable[str], max_parallelism: int) -> dict[str, dict[str, np.ndarray]]:
    digests: dict[str, dict[str, np.ndarray]] = {operator: {} for operator in forms}
    columns = _columns(parts)
    for operator, variable, key_groups in zip(*(columns[name] for name in parts.type.names), strict=True):
        numbers = np.frombuffer(key_groups, "<u8")
        if len(numbers) != max_parallelism:
            raise ValueError(f"digest of {variable} has {len(numbers)} key groups instead of {max_parallelism}")
        digests[operator][check_table_name(variable)] = numbers
    return digests


def _handles(
    parts: pa.StructArray,
    known: Mapping[str, Mapping[str, Kind]],
    digests: Mapping[str, Mapping[str, np.ndarray]],
    max_parallelism: int,
    checkpoint: int,
) -> Iterable[Handle]:
    columns = _columns(parts)
    for name in set(columns["object"]):
        check_object_name(name)
    for values in zip(*columns.values(), strict=True):
        plain = dict(zip(columns, values, strict=True))
        operator, variable, kind, form = plain["operator"], plain["variable"], Kind(plain["kind"]), Form(plain["form"])
        groups = KeyGroupRange(plain.pop("start"), plain.pop("end"))
        numbers = [plain[name] for name in ("offset", "length", "rows", "previous", "sqn")]
        if operator not in known or (kind is not Kind.INDEX and known[operator].get(variable) is not kind):
            raise ValueError(f"a handle is of {operator}.{variable}, which is in no definition")
        if kind is not Kind.INDEX and variable not in digests[operator]:
            raise ValueError(f"{operator}.{variable} has no digest")
        if not groups.start <= groups.end <= max_parallelism:
            raise ValueError(f"a handle has key groups {groups.start} to {groups.end} of {max_parallelism}")
        if min(numbers) < 0 or plain["offset"] + plain["length"] > MAX_NUMBER:
            raise ValueError(f"a handle of {operator}.{variable} has numbers out of range")
        in_file = kind is Kind.INCREMENTAL and not plain["offset"] and len(groups) > 0
        if form is Form.FILES and not (in_file and _is_written_by(plain["object"], checkpoint)):
            raise ValueError(f"a handle of {operator}.{variable} is not of a file that holds a table")
        if form is Form.DELTA and plain["previous"] >= checkpoint:
            raise ValueError(f"a delta of {operator}.{variable} builds on checkpoint {plain['previous']}")
        plain |= {"kind": kind, "form": form, "checksum": unpack(plain["checksum"]), "key_groups": groups}
        yield Handle(**plain)


def _is_written_by(name: str, checkpoint: int) -> bool:
    """Whether it is the name of a file that this checkpoint or an earlier one wrote."""
    path = CheckpointPath.of(name)
    return path is not None and path.checkpoint <= checkpoint and is_row_file(name)


def _objects(parts: pa.StructArray, ranges: Mapping[str, Any]) -> Iterable[StoredObject]:
    columns = _columns(parts)
    for name, size, checksum in zip(columns["name"], columns["bytes"], columns["checksum"], strict=True):
        check_object_name(name)
        if size < 0:
            raise ValueError(f"object {name} has {size} bytes")
        yield StoredObject(name, size, unpack(checksum), None if name not in ranges else _ranges(ranges[name]))


def _ranges(parts: Any) -> RangeChecksums:
    algorithm, range_bytes, checksums = parts
    if not isinstance(algorithm, str) or len(algorithm) > _ALGORITHM_CHARACTERS or not isinstance(checksums, str):
        raise ValueError("the checksums of an object's ranges are not texts")
    check_integer(range_bytes, 1, MAX_NUMBER, "bytes of a range")
    bytes.fromhex(checksums)
    return RangeChecksums(algorithm, range_bytes, checksums)


def _time(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text).astimezone(UTC)


_TIME_MAX_MS = 10**14
"""later than any clock shows; twice as much is still a date"""
COUNTS = frozenset(
    ("base_rows", "checkpoints", "d", "dear_for", "deltas", "restores", "rows", "rows_before", "seen", "untracked")
)
MAY_BE_NULL = frozenset(["log_ratio"])
"""what of a chain is a whole number, or null (`chains.policy_rules.PolicyState`)"""


def check_statistics(plain: Mapping[str, Any], operators: Collection[str], max_parallelism: int) -> None:
    """Check the statistics of a checkpoint with these operators.

    Raises:
        ValueError, TypeError, KeyError, UsageError: they are damaged.
    """
    json.dumps(plain, allow_nan=False)  # no catalog holds other numbers, also where no reader knows the name
    _check_counts(plain, "the statistics", "rows_in", "state_rows")
    check_integer(plain["parallelism"], 1, max_parallelism, "parallelism")
    for kind in ("dead_letters", "late"):
        for operator, count in check_object(plain.get(kind, {}), kind).items():
            check_integer(count, 0, MAX_NUMBER, f"{kind} of {check_name('operator', operator)}")
    if (outputs := plain.get("outputs")) is not None:
        for output, count in check_object(outputs, "outputs").items():
            check_integer(count, 0, MAX_NUMBER, f"rows of output {check_name('operator', output)}")
    said = check_object(plain["operators"], "operators of the statistics")
    for operator in {*operators, *said}:
        _check_operator(check_object(said[operator], f"statistics of {check_name('operator', operator)}"), operator)
    if times := plain.get("times"):
        _check_times(check_object(times, "times"))


def check_numbers(plain: Mapping[str, Any], what: str) -> None:
    """Check that an object has no other values than numbers and nulls.

    Raises:
        ValueError: it has; the message calls it `what`.
    """
    for name, value in plain.items():
        if value is not None:
            _check_number(value, f"{name} of {what}")


def _check_operator(said: Mapping[str, Any], operator: str) -> None:
    what = f"the statistics of {operator}"
    _check_counts(said, what, "rows_in", "state_rows", "bytes")
    check_numbers(check_object(said["seconds"], f"seconds of {operator}"), f"seconds of {operator}")
    known = ("incremental_bytes", "index_bytes", "restore_bound_bytes", "restore_bound_s")
    check_numbers({name: said[name] for name in known if name in said}, what)
    for table, of in check_object(said["tables"], f"tables of {operator}").items():
        _check_table(check_object(of, table), f"{operator}.{check_table_name(table)}")


def _check_table(of: Mapping[str, Any], what: str) -> None:
    check_integer(of["D"], 0, MAX_NUMBER, f"D of {what}")
    _check_chain(check_object(of["chain"], f"the chain of {what}"), what)
    known = ("bytes", "rows", "seconds", "index_bytes", "restore_bound_bytes", "restore_bound_s")
    check_numbers({name: of[name] for name in known if name in of}, what)
    if "form" in of:
        Form(of["form"])
    if "whole" in of:
        _check_pair(of["whole"], f"what {what} wrote whole")


def _check_chain(chain: Mapping[str, Any], what: str) -> None:
    check_numbers(chain, f"the chain of {what}")
    for name, value in chain.items():
        if (value is None and name not in MAY_BE_NULL) or (name in COUNTS and type(value) is not int):
            raise ValueError(f"{name} of the chain of {what} is {value}")
    check_integer(chain.get("first", 1), 1, MAX_ID, f"first of the chain of {what}")


def _check_times(times: Mapping[str, Any]) -> None:
    check_integer(times["from"], 0, _TIME_MAX_MS, "the first time")
    for id, *events in times["checkpoints"]:
        check_integer(id, 1, MAX_ID, "a checkpoint")
        for at in (each for each in events if each is not None):
            check_integer(at, 0, _TIME_MAX_MS, "a time of a checkpoint")
    for number, began, ended in times["steps"]:
        check_integer(number, 0, MAX_ID, "a step")
        for at in (began, ended):
            check_integer(at, 0, _TIME_MAX_MS, "a time of a step")


def _check_counts(plain: Mapping[str, Any], what: str, *names: str) -> None:
    for name in names:
        check_integer(plain[name], 0, MAX_NUMBER, f"{name} of {what}")


def _check_pair(numbers: Any, what: str) -> None:
    if not isinstance(numbers, Sequence) or len(numbers) != 2:
        raise ValueError(f"the statistics of {what} are not 2 numbers")
    for number in numbers:
        _check_number(number, what)


def _check_number(value: object, what: str) -> None:
    if not (type(value) is int and abs(value) <= MAX_NUMBER) and not (type(value) is float and math.isfinite(value)):
        raise ValueError(f"{what} is {str(value)[:40]!r}, not a number")
