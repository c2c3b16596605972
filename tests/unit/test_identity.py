"""A store and a catalog that do not belong together are told apart before anything is read, written or deleted."""

import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from siltstone.catalog.open import open_catalog
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.policies import PolicyOptions, policy_by_name
from siltstone.change.fork import fork
from siltstone.errors import CorruptObject, Unreachable, WrongWarehouse
from siltstone.store.filesystem import FilesystemStore
from siltstone.store.identity import encode_identity, read_identity
from siltstone.store.paths import IDENTITY
from tests.fault.small_stream import SMALL, purchases
from tests.identities import answer_not_found, identity_of, stop_at_identity
from tests.region_run import RegionRun

NAME = SMALL.name
POLICY = policy_by_name("adjust-d", PolicyOptions(d0=3, d_max=3, size_ratio_max=None, space_amplification_max=None))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A warehouse with two checkpoints."""
    root = tmp_path_factory.mktemp("identity") / "w"
    with OpenWarehouse.open_writable(str(root)) as place:
        run, rows = RegionRun(place, SMALL, POLICY), purchases()
        for n in range(2):
            run.step(rows[n])
        run.region.close("done")
    return root


@pytest.fixture
def root(written: Path, tmp_path: Path) -> Iterator[Path]:
    shutil.copytree(written, tmp_path / "w")
    before = objects(tmp_path / "w")
    yield tmp_path / "w"
    after = objects(tmp_path / "w")
    assert {n: d for n, d in before.items() if n != IDENTITY}.items() <= after.items(), "no object was lost"


def objects(root: Path) -> dict[str, bytes]:
    store = root / "objects"
    return {str(p.relative_to(store)): p.read_bytes() for p in sorted(store.rglob("*")) if p.is_file()}


def test_a_new_warehouse_has_one_identity_in_both(tmp_path: Path) -> None:
    with OpenWarehouse.open_writable(str(tmp_path / "w")) as place:
        first = identity_of(place)
        assert first is not None and len(first) == 32
    for opened in (OpenWarehouse.open_existing, OpenWarehouse.open_writable):
        with opened(str(tmp_path / "w")) as place:
            assert identity_of(place) == first
    with OpenWarehouse.open_writable(str(tmp_path / "other")) as place:
        assert identity_of(place) != first


def test_an_empty_directory_with_an_objects_folder(root: Path, tmp_path: Path) -> None:
    """As an empty volume, with the catalog elsewhere."""
    (tmp_path / "empty" / "objects").mkdir(parents=True)
    catalog = f"sqlite:///{root}/catalog.db"
    with OpenWarehouse.open_existing(str(root)) as place:
        identity = identity_of(place)
        runs = place.catalog.runs.list(NAME)
    for opened in (OpenWarehouse.open_existing, OpenWarehouse.open_writable):
        said = (
            rf"empty does not hold this catalog's warehouse: it has no identity, .* has {identity}; check --warehouse"
        )
        with pytest.raises(WrongWarehouse, match=said):
            opened(str(tmp_path / "empty"), catalog)
    assert objects(tmp_path / "empty") == {}
    with OpenWarehouse.open_existing(str(root)) as place:
        assert place.catalog.checkpoints.last_id(NAME) == 2 and place.catalog.runs.list(NAME) == runs


def test_the_right_store_with_another_catalog(root: Path, tmp_path: Path) -> None:
    with OpenWarehouse.open_writable(str(tmp_path / "other")) as other:
        other.catalog.streams.register(NAME, 128, {})
        second = identity_of(other)
    with OpenWarehouse.open_existing(str(root)) as place:
        first = identity_of(place)
    for opened in (OpenWarehouse.open_existing, OpenWarehouse.open_writable):
        with pytest.raises(
            WrongWarehouse, match=rf"it has identity {first}, the catalog .*other.* has identity {second}"
        ):
            opened(str(root), f"sqlite:///{tmp_path}/other/catalog.db")


def test_a_forgotten_catalog_makes_no_new_one(root: Path, tmp_path: Path) -> None:
    (root / "catalog.db").rename(tmp_path / "elsewhere.db")
    before = sorted(root.rglob("*"))
    for opened in (OpenWarehouse.open_writable, OpenWarehouse.open_existing):
        with pytest.raises(
            WrongWarehouse,
            match=rf"with stream {NAME}, but there is no catalog at .*catalog.db: name its own .*`siltstone rebuild-",
        ):
            opened(str(root))
    assert sorted(root.rglob("*")) == before
    with OpenWarehouse.open_writable(str(root), f"sqlite:///{tmp_path}/elsewhere.db") as place:
        assert place.catalog.checkpoints.last_id(NAME) == 2


@pytest.mark.parametrize("opened", [OpenWarehouse.open_writable, OpenWarehouse.open_existing])
def test_an_empty_catalog_where_the_own_one_is_lost(
    root: Path, tmp_path: Path, opened: Callable[[str, str], OpenWarehouse]
) -> None:
    url = f"sqlite:///{tmp_path}/empty.db"
    open_catalog(url).close()
    said = rf"with stream {NAME}, but the catalog .*empty.db is not its own: .*`siltstone rebuild-catalog`"
    with pytest.raises(WrongWarehouse, match=said):
        opened(str(root), url)


@pytest.mark.slow
def test_objects_without_identity_and_a_catalog_that_is_not_theirs(root: Path, tmp_path: Path) -> None:
    (root / "objects" / IDENTITY).unlink()
    for opened in (OpenWarehouse.open_writable, OpenWarehouse.open_existing):
        with pytest.raises(WrongWarehouse, match=r"has an identity, and they are not new: name the"):
            opened(str(root), f"sqlite:///{tmp_path}/new.db")


@pytest.mark.parametrize("after", [False, True], ids=["before the object", "after the object"])
def test_stopped_while_an_identity_is_written(tmp_path: Path, after: bool) -> None:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stop_at_identity(patch, after=after)
        OpenWarehouse.open_writable(str(tmp_path / "w"))
    with OpenWarehouse.open_existing(str(tmp_path / "w")) as place:  # makes no identity, finds none that is not its own
        assert place.catalog.streams.list() == []
        proposed = place.catalog.identity.read()
    with OpenWarehouse.open_writable(str(tmp_path / "w")) as place:
        assert identity_of(place) == (proposed.identity or proposed.next)


def test_many_processes_make_one_warehouse(tmp_path: Path) -> None:
    start = Barrier(4, timeout=60)

    def make(_: int) -> str | None:
        start.wait()
        with OpenWarehouse.open_writable(str(tmp_path / "w")) as place:
            return place.catalog.identity.read().identity

    with ThreadPoolExecutor(4) as pool:
        found = set(pool.map(make, range(4)))
    with OpenWarehouse.open_existing(str(tmp_path / "w")) as place:
        assert found == {identity_of(place)}


def test_a_catalog_is_opened_while_another_process_reads_it_for_the_first_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen: one of four processes found the database locked, which it was only just making."""
    readers: list[sqlite3.Connection] = []

    def appear(draft: Path, path: Path) -> None:
        link(draft, path)
        readers.append(sqlite3.connect(path, isolation_level=None))
        readers[0].execute("BEGIN")
        readers[0].execute("SELECT count(*) FROM sqlite_master").fetchall()

    link = os.link
    monkeypatch.setattr(os, "link", appear)
    with open_catalog(f"sqlite:///{tmp_path}/catalog.db", timeout_s=0.2) as catalog:
        assert catalog.streams.list() == []
    readers[0].close()


def test_two_catalogs_make_a_warehouse_in_one_store(tmp_path: Path) -> None:
    """The store decides; the other catalog is refused, and can have another store."""
    (tmp_path / "w").mkdir()
    urls = [f"sqlite:///{tmp_path}/{n}.db" for n in "ab"]
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stop_at_identity(patch, after=False)
        OpenWarehouse.open_writable(str(tmp_path / "w"), urls[0])
    with OpenWarehouse.open_writable(str(tmp_path / "w"), urls[1]) as place:
        assert identity_of(place)
    with pytest.raises(WrongWarehouse):
        OpenWarehouse.open_writable(str(tmp_path / "w"), urls[0])
    with OpenWarehouse.open_writable(str(tmp_path / "free"), urls[0]) as place:
        assert identity_of(place)


def test_a_moved_warehouse_keeps_its_identity_and_a_fork_shares_it(root: Path, tmp_path: Path) -> None:
    with OpenWarehouse.open_existing(str(root)) as place:
        identity = identity_of(place)
        fork(place, NAME, "fork")
    root.rename(tmp_path / "moved")
    with OpenWarehouse.open_existing(str(tmp_path / "moved")) as place:
        assert identity_of(place) == identity and {s.name for s in place.catalog.streams.list()} == {NAME, "fork"}
    (tmp_path / "moved").rename(root)


def test_a_cloned_warehouse_gets_an_identity_of_its_own(root: Path, tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    shutil.copytree(root, clone)
    made = OpenWarehouse.reidentify(str(clone))
    with OpenWarehouse.open_existing(str(clone)) as cloned, OpenWarehouse.open_existing(str(root)) as place:
        assert identity_of(cloned) == made.identity != made.before == identity_of(place)
    with pytest.raises(WrongWarehouse):
        OpenWarehouse.open_existing(str(root), f"sqlite:///{clone}/catalog.db")
    with pytest.raises(WrongWarehouse):
        OpenWarehouse.open_existing(str(clone), f"sqlite:///{root}/catalog.db")


@pytest.mark.parametrize("after", [False, True], ids=["before the object", "after the object"])
def test_stopped_while_a_new_identity_is_written(root: Path, after: bool) -> None:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stop_at_identity(patch, after=after)
        OpenWarehouse.reidentify(str(root))
    for opened in (OpenWarehouse.open_existing, OpenWarehouse.open_writable):
        with pytest.raises(WrongWarehouse, match="was interrupted: run `siltstone reidentify` again"):
            opened(str(root))
    made = OpenWarehouse.reidentify(str(root))
    with OpenWarehouse.open_existing(str(root)) as place:
        assert identity_of(place) == made.identity


def test_no_new_identity_without_what_the_catalog_tells_of(root: Path, tmp_path: Path) -> None:
    (tmp_path / "empty" / "objects").mkdir(parents=True)
    with pytest.raises(WrongWarehouse):
        OpenWarehouse.reidentify(str(tmp_path / "empty"), f"sqlite:///{root}/catalog.db")
    with OpenWarehouse.open_existing(str(root)) as place:
        assert identity_of(place)


def test_a_spell_of_404s_is_not_another_warehouse(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch, pytest.raises(Unreachable, match="lists _warehouse/identity but does not ret"):
        answer_not_found(patch)
        OpenWarehouse.open_existing(str(root))
    with monkeypatch.context() as patch, pytest.raises(WrongWarehouse, match="that the store answers"):
        answer_not_found(patch, listed=False)
        OpenWarehouse.open_existing(str(root))
    with OpenWarehouse.open_existing(str(root)) as place:
        place.confirm_store()
        for listed in (True, False):
            with monkeypatch.context() as patch, pytest.raises(Unreachable):
                answer_not_found(patch, listed=listed)
                place.confirm_store()


def test_a_damaged_identity_is_written_anew_by_hand(root: Path) -> None:
    path = root / "objects" / IDENTITY
    good = path.read_bytes()
    path.chmod(0o644)
    for bad in (good[:-1], good.replace(good[30:32], b"zz")):
        path.write_bytes(bad)
        with pytest.raises(CorruptObject, match="siltstone reidentify"):
            OpenWarehouse.open_existing(str(root))
    made = OpenWarehouse.reidentify(str(root))
    with OpenWarehouse.open_existing(str(root)) as place:
        assert identity_of(place) == made.identity
        assert read_identity(FilesystemStore(root / "objects")) == made.identity
    assert path.read_bytes() == encode_identity(made.identity)
