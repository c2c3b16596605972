"""A fork inside Spark: it takes up the input where its checkpoint ends, and comes to what the parent comes to."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.retention.sweep import sweep
from tests.command_line import CONFIGURATION, siltstone
from tests.spark_streams import FILES

pytestmark = pytest.mark.usefixtures("spark")
NEW = "what-if"


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project of one stream, to be in."""
    (tmp_path / "siltstone.toml").write_text(CONFIGURATION)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def digests(stream: str) -> dict[int, str]:
    with OpenWarehouse.open_existing("w") as place:
        return {c.id: c.digest for c in place.catalog.checkpoints.list(stream)}


def sink_rows(stream: str) -> list[int]:
    return sorted(pq.read_table(Path("w") / "sink" / stream / "accounts").column("sequence").to_pylist())


def test_a_fork_runs_on_from_its_checkpoint_as_the_parent_did(project: Path) -> None:
    assert siltstone("run", "little", "--batches", 4, "--json").json["checkpoints"] == [1, 2, 3, 4]
    assert siltstone("fork", "little", NEW, "--at", 2, "--json").json["digest"] == digests("little")[2]
    ran = siltstone("run", NEW, "--json").json
    assert (ran["stream"], ran["checkpoints"], ran["rows"]) == (NEW, list(range(3, FILES + 1)), (FILES - 2) * 300)
    assert siltstone("run", "little", "--json").json["checkpoints"] == list(range(5, FILES + 1))
    assert digests("little") | digests(NEW) == digests("little"), "the same input, the same state"
    assert sink_rows("little") == list(range(FILES * 300))
    assert sink_rows(NEW) == list(range(600, FILES * 300)), "its output is its own, from its checkpoint on"
    assert not (project / "w" / "source" / NEW).exists(), "it reads on where the parent's source keeps its files"
    siltstone("materialize", "little")
    deleted = siltstone("delete", "little", *range(1, FILES), "--json").json
    assert deleted["deleted"] == list(range(1, FILES)), "the parent lets go of all that the fork begins with"
    with OpenWarehouse.open_existing("w") as place:
        assert sweep(place, "little").found == sweep(place, NEW).found == 0
    assert siltstone("verify", NEW, "--all", "--json").json["proven"] == list(range(2, FILES + 1))
    assert siltstone("restore", NEW, "--at", 2, "--json").json["digest"] == digests(NEW)[2]
    siltstone("materialize", NEW)
    siltstone("truncate", NEW, "--keep-last", 1)
    with OpenWarehouse.open_existing("w") as place:
        names = {o.name for o in place.catalog.objects.list(NEW)}
        assert names and all(name.startswith(f"{NEW}/") for name in names), "independent of the parent by now"
    assert not siltstone("verify", "little", "--all", "--json").json["failed"]
    again = siltstone("run", NEW, "--json").json
    assert (again["checkpoints"], again["digest"]) == ([], digests(NEW)[FILES])
