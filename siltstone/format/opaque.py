"""An opaque variable at one checkpoint: its bytes per key group, framed by lengths. Nothing is pickled.

"SILTOPQ1" | count | key groups (differences) | lengths | joined bytes | xxh3-64
"""

from collections.abc import Mapping

import numpy as np

from siltstone.decoding import translate_decode_errors
from siltstone.errors import UsageError
from siltstone.format.coding import KEY_GROUPS_MAX, Bytes, Decoder, Encoder, seal, unseal

MAGIC = b"SILTOPQ1"


def encode_opaque(values: Mapping[int, bytes]) -> bytes:
    """Encode `values` (key group -> bytes) as one byte string, deterministically.

    Raises:
        UsageError: a key group is out of range.
    """
    groups = sorted(values)
    if groups and not (groups[0] >= 0 and groups[-1] < KEY_GROUPS_MAX):
        raise UsageError(f"opaque values for key groups {groups[0]} to {groups[-1]}: use 0 to 65535")
    out = Encoder()
    out.varint(len(groups))
    out.runs(np.diff(np.array(groups, dtype=np.int64), prepend=0).astype(np.uint64))
    out.varints([len(values[group]) for group in groups])
    out.blob(b"".join(values[group] for group in groups))
    return seal(out.finish(), MAGIC)


def decode_opaque(data: Bytes, name: str = "an opaque value") -> dict[int, bytes]:
    """Decode key group -> bytes, ascending.

    Raises:
        CorruptObject: cut, altered, or something else; the message contains `name`.
    """
    with translate_decode_errors(name, "an opaque value"):
        read = Decoder(unseal(data, MAGIC, name), name)
        count = read.count()
        if count > KEY_GROUPS_MAX:
            raise read.damage_error(f"it claims {count} key groups")
        steps = read.runs(count)
        if count and (steps.max() >= KEY_GROUPS_MAX or not steps[1:].all() or steps.sum() >= KEY_GROUPS_MAX):
            raise read.damage_error("its key groups do not ascend, or are too high")
        groups = np.cumsum(steps).tolist()
        lengths = read.varints(count).tolist()
        joined = bytes(read.blob())
        if sum(lengths) != len(joined):
            raise read.damage_error("its values do not add up")
        ends = np.cumsum(lengths, dtype=np.int64).tolist()
        return {g: joined[end - n : end] for g, n, end in zip(groups, lengths, ends, strict=True)}
