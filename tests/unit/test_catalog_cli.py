"""siltstone upgrade, backup and restore-catalog, as people use them."""

import stat
from pathlib import Path

import pytest

from siltstone.catalog.database.tables import REVISION
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.errors import WrongWarehouse
from tests.command_line import plain, siltstone
from tests.next_revision import NEXT, plant_next_revision
from tests.outbox_run import NAME, Heard, write


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def older_warehouse(root: Path, patch: pytest.MonkeyPatch) -> None:
    """Make a warehouse of an older Siltstone."""
    with OpenWarehouse.open_writable(str(root)) as place:
        place.catalog.streams.register("flights", 128, {})
    plant_next_revision(patch, root.parent)


def test_an_older_catalog_is_refused_by_each_command_and_upgraded_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    older_warehouse(tmp_path / "warehouse", monkeypatch)
    said = f"(catalog revision {REVISION}, this one needs {NEXT}): stop what runs on it, then `siltstone upgrade`"
    for command in ("checkpoints", "verify", "truncate", "sweep", "recover"):
        siltstone(command, "flights").failed(2, "made by an older Siltstone", said)
    [upgraded] = plain(siltstone("upgrade"))
    assert upgraded.startswith(f"the catalog now has revision {NEXT}, before {REVISION}; backup: ")
    [backup] = (tmp_path / "warehouse").glob(f"catalog-*-r{REVISION}.backup")
    assert str(backup) in upgraded and stat.S_IMODE(backup.stat().st_mode) == 0o600
    assert plain(siltstone("upgrade")) == [f"the catalog has revision {NEXT}: nothing to do"]
    assert siltstone("upgrade", "--json").json == {
        "before": NEXT,
        "after": NEXT,
        "fenced": [],
        "backup": None,
    }


def test_an_upgrade_says_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    siltstone("upgrade").failed(2, "no catalog at")
    older_warehouse(tmp_path / "warehouse", monkeypatch)
    (tmp_path / "there").touch()
    siltstone("upgrade", "--backup", "there").failed(2, "there exists already: name another file")
    siltstone("upgrade", "--backup", "nosuch/file").failed(3, "cannot write nosuch/file", "No such file")
    assert siltstone("upgrade", "--backup", "mine", "--json").json["backup"]["file"] == "mine"


def test_a_lost_catalog_is_rebuilt(tmp_path: Path) -> None:
    with OpenWarehouse.open_writable(str(tmp_path / "warehouse")) as place:
        write(place, Heard(), 2).region.close("done")
        identity = place.catalog.identity.read().identity
    siltstone("rebuild-catalog").failed(2, "there is a catalog at", "was not changed")
    for path in (tmp_path / "warehouse").glob("catalog.db*"):
        path.unlink()
    with pytest.raises(WrongWarehouse, match="siltstone rebuild-catalog"):
        OpenWarehouse.open_writable(str(tmp_path / "warehouse"))
    doctor = siltstone("doctor")
    assert doctor.code == 1 and "`siltstone rebuild-catalog`" in " ".join(doctor.out.split())
    done = siltstone("rebuild-catalog", "--json").json
    assert done["identity"] == identity and done["left_out"] == [] and len(done["unknown"]) == 3
    [stream] = done["streams"]
    assert (stream["stream"], stream["newest"], stream["checkpoints"], stream["steps"]) == (NAME, 2, 2, 2)
    for path in (tmp_path / "warehouse").glob("catalog.db*"):
        path.unlink()
    head, line, *_ = plain(siltstone("rebuild-catalog"))
    assert head.endswith("is rebuilt:") and line.strip() == f"{NAME}: 2 checkpoints up to 2, 2 steps"
