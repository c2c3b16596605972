"""Where sources begin, if a stream gets some of them later: step 0 of its input log has the first answer of each."""

import json
from collections.abc import Container, Iterable, Mapping
from dataclasses import replace
from typing import Any

from siltstone.catalog.records.commit_details import INPUTS
from siltstone.catalog.records.source_entries import (
    NAMED,
    decode_offsets,
    decode_sources,
    encode_offsets,
    header_of,
    name_of_log,
)
from siltstone.catalog.records.steps import Step
from siltstone.operator import SOURCE


def names_in(beginning: Step) -> set[str]:
    """Return the sources of which a step 0 tells where they begin, or what was pruned of their logs."""
    logs = decode_sources(beginning.sources)
    return {*decode_offsets(beginning.offsets), *(name_of_log(beginning.offsets, log) for log in logs)}


def add_beginnings(known: Step, new: Step) -> Step:
    """Add the offsets at which further sources begin to a recorded step 0; sources that it already has keep theirs.

    Args:
        new: of named sources.
    """
    there = names_in(known)
    added = {name: offset for name, offset in decode_offsets(new.offsets).items() if name not in there}
    if not added:
        return known
    logs = {name: entries for name, entries in decode_sources(new.sources).items() if name in added}
    header = header_of(known.offsets or new.offsets)
    offsets = encode_offsets(f"{NAMED}\n{header}", [*decode_offsets(known.offsets).items(), *added.items()])
    return replace(known, offsets=offsets, sources=json.dumps({**decode_sources(known.sources), **logs}))


def sources_of(definitions: Iterable[Mapping[str, Any]]) -> set[str]:
    """Return the names of the sources of a stream that was made under these definitions, one after the other."""
    return {name for each in definitions for name in each.get(INPUTS, (SOURCE,))}


def only_of(beginning: Step, sources: Container[str]) -> Step:
    """Return a recorded beginning without the named sources that are not among `sources`.

    Step 0 also has the offsets at which sources begin that were added after a checkpoint. A fork or an export of that
    checkpoint must not have them: if it gets such a source, that is asked anew where it begins.
    """
    if not beginning.offsets.startswith(f"{NAMED}\n"):
        return beginning

    def stays(name: str) -> bool:
        return name.partition(".")[0] in sources  # one of Spark's, of a source that is several

    told, logs = decode_offsets(beginning.offsets), decode_sources(beginning.sources)
    kept = {log: entries for log, entries in logs.items() if stays(name_of_log(beginning.offsets, log))}
    if len(kept) == len(logs) and all(map(stays, told)):
        return beginning
    header = f"{NAMED}\n{header_of(beginning.offsets)}"
    offsets = encode_offsets(header, [(name, offset) for name, offset in told.items() if stays(name)])
    return replace(beginning, offsets=offsets, sources=json.dumps(kept))
