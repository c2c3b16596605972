"""Restore many checkpoints of a stream, walking each chain once, so that shared blocks are read once.

    ROOT/<label>/                      one restored checkpoint (`restore.export`), complete or absent
       |- <operator>/<table>/part-<first key group>.parquet
       '- _restored.json               its checkpoint, digest and number of rows
    ROOT/.series-<id>/<checkpoint>/    being written

The caller chooses the labels, such as the days of a year. Several may show the same checkpoint, and share its files if
the file system has links. If it is killed, published labels are complete, and the next call continues with the others.
"""

import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from siltstone.errors import Unreachable
from siltstone.format.manifest import Manifest
from siltstone.format.manifests import opaque_of
from siltstone.model import KeyGroupRange
from siltstone.restore.export import write_state
from siltstone.restore.restore import MemoryState, digests_of
from siltstone.restore.verify import Failure, ProofTask, prove
from siltstone.state.digest import assemble_digests, checkpoint_digest, opaque_digest, row_digests
from siltstone.store.base import Store
from siltstone.store.directories import path_below
from siltstone.store.paths import check_label
from siltstone.store.private import write_private_file

NOTE = "_restored.json"
"""the file that describes a label; Spark and Arrow ignore files whose names begin with an underscore"""


@dataclass(frozen=True)
class RestoredLabel:
    """The restored checkpoint under one label; its `digest` is proven."""

    label: str
    checkpoint: int
    digest: str
    rows: int


@dataclass(frozen=True)
class SeriesPart:
    """The result of one chain: per checkpoint, the digests of its key groups (table -> uint64[n]) and its rows.

    `restore_s` and `restore_bytes`: what rebuilding it took (`ChainProof`), without writing it.
    """

    operator: str
    key_groups: KeyGroupRange
    digests: dict[int, dict[str, np.ndarray]]
    rows: dict[int, int]
    failures: list[Failure]
    restore_s: Mapping[int, float] = field(default_factory=dict)
    restore_bytes: Mapping[int, int] = field(default_factory=dict)


def restore_chain(store: Store, task: ProofTask, directory: Path, scratch: Path | None = None) -> SeriesPart:
    """Walk one chain and write the state of every checkpoint that the task proves below `directory/<checkpoint>`.

    Args:
        scratch: see `BlockReader`.

    Raises:
        Unreachable: the directory cannot be written.
    """
    chain = task.chain
    part = SeriesPart(chain.operator, chain.key_groups, {}, {}, [])

    def write(checkpoint: int, state: MemoryState) -> None:
        write_state(state, path_below(directory, str(checkpoint), chain.operator))
        part.digests[checkpoint] = digests_of(state)
        part.rows[checkpoint] = sum(table.rows for table in state.tables.values())

    proof = prove(store, task, write, scratch)
    part.failures.extend(proof.failures)
    return replace(part, restore_s=proof.restore_s, restore_bytes=proof.restore_bytes)


def digest_of(parts: Iterable[SeriesPart], manifest: Manifest) -> tuple[str, int]:
    """Return (a checkpoint's digest, assembled from its parts; its rows)."""
    own = [part for part in parts if manifest.checkpoint in part.digests]
    found = ((part.operator, part.key_groups, part.digests[manifest.checkpoint]) for part in own)
    digest = checkpoint_digest(assemble_digests(found, manifest.max_parallelism))
    return digest, sum(part.rows[manifest.checkpoint] for part in own)


def read_label(root: Path, label: str) -> RestoredLabel | None:
    """Read the description of a label; None if it is missing or cannot be read.

    Raises:
        UsageError: the label is not valid. It may be the name of a partition, which users of Dagster's page choose.
    """
    check_label(label)
    try:
        said = json.loads((root / label / NOTE).read_text())
        return RestoredLabel(label, int(said["checkpoint"]), str(said["digest"]), int(said["rows"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def prove_label(root: Path, label: str, manifest: Manifest) -> str | None:
    """Compare the files under a label with a manifest's digests; return why they differ, or None.

    Every row is read again, batch by batch, so that a file changed, lost or added since the restore is found.
    """
    for operator, tables in manifest.digests.items():
        opaque = opaque_of(manifest, operator)
        for name, recorded in tables.items():
            directory = path_below(root / label, operator, name)
            try:
                found = _table_digest(directory, name in opaque)
            except (OSError, pa.ArrowException) as error:
                return f"{operator}/{name} cannot be read: {error}"
            if found != int(np.asarray(recorded, np.uint64).sum(dtype=np.uint64)):
                return f"{operator}/{name} holds other rows than checkpoint {manifest.checkpoint} had"
    return None


def _table_digest(directory: Path, opaque: bool) -> int:
    """Return the sum of the digests of all rows below a directory, modulo 2**64."""
    total = np.zeros(1, np.uint64)
    for file in sorted(directory.glob("*.parquet")):
        with pq.ParquetFile(file) as opened:
            for batch in opened.iter_batches():
                if opaque:
                    digests = np.array([opaque_digest(v) for v in batch.column("value").to_pylist()], np.uint64)
                else:
                    digests = row_digests(pa.Table.from_batches([batch]))
                total += digests.sum(dtype=np.uint64)
    return int(total[0])


def publish_labels(root: Path, restored: Path, labels: Sequence[RestoredLabel]) -> None:
    """Publish one restored checkpoint under its labels, each complete or absent. `restored` is moved away.

    Raises:
        Unreachable: the labels cannot be written.
    """
    try:
        for label in labels[:-1]:
            copy = restored.with_name(f"{restored.name}-{label.label}")
            shutil.copytree(restored, copy, copy_function=_link)
            _publish(root, copy, label)
        _publish(root, restored, labels[-1])
    except OSError as error:
        raise Unreachable(f"cannot write below {root}: {error.strerror}; check permissions and free space") from error


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # the file system has no links, or allows no more of them
        shutil.copy2(source, target)


def _publish(root: Path, restored: Path, label: RestoredLabel) -> None:
    write_private_file(restored / NOTE, (json.dumps(asdict(label)) + "\n").encode())
    final = root / label.label
    if final.exists():  # of another checkpoint, or damaged; its replacement is proven and ready
        os.rename(final, restored.with_name(f"{restored.name}-replaced"))
    os.rename(restored, final)


def labels_by_checkpoint(labels: Mapping[str, int]) -> dict[int, list[str]]:
    """Return checkpoint -> its labels, both ascending."""
    found: dict[int, list[str]] = {}
    for label, checkpoint in sorted(labels.items(), key=lambda item: (item[1], item[0])):
        found.setdefault(checkpoint, []).append(label)
    return found
