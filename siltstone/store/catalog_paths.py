"""Names of the objects in which the store holds what the catalog knows of a stream (`catalog.extracts`).

_catalog/<stream>/<epoch:08d>-<number:012d>          an extract
_catalog/<stream>/steps-<epoch:08d>-<number:012d>    steps of the input log, written with that extract
_catalog/<stream>/beginning-<hash>                   step 0 of the input log, named by its content
"""

import re

from siltstone.model import check_name

_CATALOG = "_catalog"
_OURS = re.compile(
    rf"{_CATALOG}/([a-z][a-z0-9_-]{{0,63}})/(?:(?P<steps>steps-)?(?P<epoch>[0-9]{{8}})-(?P<number>[0-9]{{12}})|beginning-[0-9a-f]+)"
)


def extract_prefix(stream: str) -> str:
    """Return the prefix of these objects of a stream, separate from its other objects, so that sweeps do not list
    them."""
    return f"{_CATALOG}/{check_name('stream', stream)}/"


def extract_name(stream: str, epoch: int, number: int) -> str:
    """Return the name of an extract."""
    return f"{extract_prefix(stream)}{epoch:08d}-{number:012d}"


def steps_part_name(stream: str, epoch: int, number: int) -> str:
    """Return the name of the steps that are written with an extract."""
    return f"{extract_prefix(stream)}steps-{epoch:08d}-{number:012d}"


def beginning_name(stream: str, hash: str) -> str:
    """Return the name of a step 0 whose bytes have this hash (hex)."""
    return f"{extract_prefix(stream)}beginning-{hash}"


def extract_number(name: str) -> tuple[int, int] | None:
    """Return (epoch, number) of an extract's name; None for other names."""
    found = _OURS.fullmatch(name)
    return (int(found["epoch"]), int(found["number"])) if found and found["epoch"] and not found["steps"] else None


def steps_part_number(name: str) -> tuple[int, int] | None:
    """Return (epoch, number) of the name of a part with steps; None for other names."""
    found = _OURS.fullmatch(name)
    return (int(found["epoch"]), int(found["number"])) if found and found["steps"] else None


def stream_of_extract(name: str) -> str | None:
    """Return the stream that such an object belongs to; None for other names."""
    found = _OURS.fullmatch(name)
    return found[1] if found else None


ALL_EXTRACTS = f"{_CATALOG}/"
"""the prefix of these objects of all streams"""
