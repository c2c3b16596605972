"""Where sources begin, if a stream gets some of them later: step 0 of its input log has the first answer of each."""

import json
from dataclasses import replace

from siltstone.catalog.records.source_entries import (
    NAMED,
    decode_offsets,
    decode_sources,
    encode_offsets,
    header_of,
    name_of_log,
)
from siltstone.catalog.records.steps import Step


def names_in(beginning: Step) -> set[str]:
    """Return the sources of which a step 0 tells where they begin, or what was pruned of their logs."""
    logs = decode_sources(beginning.sources)
    return {*decode_offsets(beginning.offsets), *(name_of_log(beginning.offsets, log) for log in logs)}


def add_beginnings(known: Step, new: Step) -> Step:
    """Add to a recorded beginning where further sources begin; those that it tells of stay as they are.

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
