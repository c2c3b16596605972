"""Write extracts of the catalog into the store (`catalog.extracts`), and read the newest one.

First the parts that it names are stored, then the extract; then older ones are deleted. If the process dies in between,
the extract before is the newest and complete, and the next one deletes what is left. Parts that only the extract before
names stay until the next one, for a writer that is reading it now.

Steps that no manifest holds go into parts. A part smaller than half of all later ones is merged with them. So there are
few parts, and each step is rewritten only a few times, however long the log is.
"""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace

import xxhash

from siltstone.catalog.extract_coding import decode_extract, encode_beginning, encode_extract, encode_steps_part
from siltstone.catalog.records.extracts import Extract, StepPart, TakenExtract
from siltstone.catalog.records.steps import Step
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.errors import CorruptObject, ObjectExists, Unreachable
from siltstone.log import get_logger
from siltstone.model import StoredObject
from siltstone.store.base import Store
from siltstone.store.checksums import checksum_of
from siltstone.store.paths import (
    beginning_name,
    extract_name,
    extract_number,
    extract_prefix,
    steps_part_name,
    steps_part_number,
    stream_of_extract,
)

_LOG = get_logger(__name__)


def write_extract(warehouse: OpenWarehouse, stream: str) -> Extract:
    """Write what the catalog knows of a stream now into the store, and delete older extracts.

    Raises:
        UnknownStream: the stream does not exist.
        WrongWarehouse: the catalog has lost what an extract in the store says; none was written.
        Unreachable: the store or the catalog failed; the store may have no newer extract.
    """
    store, catalog = warehouse.warehouse.store, warehouse.catalog
    there, before = _read_before(store, stream)
    taken = catalog.extracts.take(stream, (before.epoch, before.number) if before else (0, 0))
    own = (taken.extract.epoch, taken.extract.number)
    beginning = None if taken.beginning is None else _store_beginning(store, stream, taken.beginning, there)
    extract = replace(taken.extract, beginning=beginning, parts=_store_parts(warehouse, taken, before))
    store.put(extract_name(stream, *own), encode_extract(extract))
    store.delete(_find_unneeded(there, own, [each for each in (before, extract) if each]))
    return extract


def try_write_extract(warehouse: OpenWarehouse, stream: str) -> None:
    """Write an extract; if the store or the catalog fails, log that, since the stream's next run writes one."""
    try:
        write_extract(warehouse, stream)
    except Unreachable as error:
        _LOG.warning("the store does not hold the newest change of the catalog yet", stream=stream, error=str(error))


def read_newest_extract(store: Store, stream: str) -> Extract | None:
    """Read the newest extract of a stream; None if there is none.

    Another writer may write a newer one meanwhile, and delete this one: then the newer one is read.

    Raises:
        CorruptObject: it is damaged, or another stream's.
        NewerFormat: a newer Siltstone wrote it.
        Unreachable: the store does not answer.
    """
    there = dict(store.list(extract_prefix(stream)))
    while True:
        try:
            return _read_newest(store, stream, there)
        except CorruptObject:
            before, there = _find_newest(there), dict(store.list(extract_prefix(stream)))
            if _find_newest(there) == before:
                raise


def _find_newest(there: Iterable[str]) -> str | None:
    numbered = {number: name for name in there if (number := extract_number(name)) is not None}
    return numbered[max(numbered)] if numbered else None


def _read_newest(store: Store, stream: str, there: dict[str, int]) -> Extract | None:
    name = _find_newest(there)
    if name is None:
        return None
    extract = decode_extract(store.read_range(name, 0, there[name]).to_pybytes(), name)
    if (extract.stream, (extract.epoch, extract.number)) != (stream, extract_number(name)):
        raise CorruptObject(f"object {name} was altered: it is extract {extract.number} of stream {extract.stream}")
    return extract


def _read_before(store: Store, stream: str) -> tuple[dict[str, int], Extract | None]:
    """List a stream's extracts and parts, and read the extract that the next one follows.

    Another writer may delete it meanwhile, so it is looked for twice. Without one, the next is made from the catalog
    alone.
    """
    for attempt in range(2):
        there = dict(store.list(extract_prefix(stream)))
        try:
            return there, _read_newest(store, stream, there)
        except CorruptObject as error:
            if attempt:
                _LOG.warning("an extract of the catalog is written anew", stream=stream, error=str(error))
    return there, None


def _store_beginning(store: Store, stream: str, beginning: Step, there: Iterable[str]) -> StoredObject:
    data = encode_beginning(beginning)
    name = beginning_name(stream, xxhash.xxh3_128_hexdigest(data))
    if name not in there:
        with suppress(ObjectExists):
            return store.put(name, data)
    return StoredObject(name, len(data), checksum_of(data, store.checksums))


def _store_parts(warehouse: OpenWarehouse, taken: TakenExtract, before: Extract | None) -> tuple[StepPart, ...]:
    """Store the steps that no manifest and no earlier part holds; return all parts."""
    extract, catalog_only = taken.extract, set(taken.catalog_only)
    # A rollback may have changed what a part holds.
    parts = list(before.parts) if before and before.rollbacks == extract.rollbacks else []
    parts = [part for part in parts if catalog_only & _ids(part)]
    new = catalog_only - {id for part in parts for id in _ids(part)}
    if not new:
        return tuple(parts)
    while parts and parts[-1].steps <= 2 * len(new):
        new |= catalog_only & _ids(parts.pop())
    ranges = _ranges(new)
    steps = warehouse.catalog.extracts.list_steps(extract.stream, ranges)
    name = steps_part_name(extract.stream, extract.epoch, extract.number)
    stored = warehouse.warehouse.store.put(name, encode_steps_part(steps))
    return (*parts, StepPart(stored, len(steps), ranges))


def _ids(part: StepPart) -> set[int]:
    return {id for first, last in part.ranges for id in range(first, last + 1)}


def _ranges(ids: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Return ascending ids as (first, last) of each run without gaps."""
    found: list[tuple[int, int]] = []
    for id in sorted(ids):
        if found and found[-1][1] == id - 1:
            found[-1] = (found[-1][0], id)
        else:
            found.append((id, id))
    return tuple(found)


def _find_unneeded(there: Iterable[str], own: tuple[int, int], needing: Sequence[Extract]) -> list[str]:
    """Return older extracts, and older parts that none of these extracts names."""
    needed = {part.stored.name for extract in needing for part in extract.parts}
    needed |= {extract.beginning.name for extract in needing if extract.beginning}
    unneeded = []
    for name in filter(stream_of_extract, there):
        number = extract_number(name) or steps_part_number(name)
        if name not in needed and (number is None or number < own):
            unneeded.append(name)
    return unneeded
