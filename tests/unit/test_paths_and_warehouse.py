import copy
import os
from pathlib import Path

import pytest

from siltstone.errors import SiltstoneError, Unreachable, UsageError
from siltstone.store.open import Warehouse, open_store
from siltstone.store.paths import CheckpointPath, LocalLayout, check_object_name, epoch_prefix, is_base, stream_prefix


def test_object_names() -> None:
    path = CheckpointPath("flights", 3, 42)
    assert path.manifest() == "flights/00000003/000000000042/manifest.arrow"
    assert path.segment("0c-1") == "flights/00000003/000000000042/0c-1.segment"
    assert path.segment("0c-1", "INCR") == "flights/00000003/000000000042/0c-1.INCR"
    assert path.base("aircraft", "recent.bounds", 1, "a7") == (
        "flights/00000003/000000000042/aircraft.recent.bounds.00001.a7.base.parquet"
    )
    assert path.snapshot("aircraft", "totals", 1, 7).endswith("/aircraft.totals.00001.7.snapshot.parquet")
    for name in (path.manifest(), path.segment("a"), path.base("a", "b", 0, 0)):
        assert check_object_name(name) == name
        assert CheckpointPath.of(name) == path
        assert name.startswith(path.prefix)
    assert [is_base(n) for n in (path.base("a", "b", 0, 0), path.segment("a"))] == [True, False]
    assert path.prefix.startswith(epoch_prefix("flights", 3))
    assert epoch_prefix("flights", 3).startswith(stream_prefix("flights"))


def test_names_sort_by_checkpoint() -> None:
    names = [CheckpointPath("s", e, c).manifest() for e in (1, 9, 10) for c in (1, 99, 100)]
    assert names == sorted(names)


@pytest.mark.parametrize("name", ["x", "flights/1/2/manifest.arrow", "f/00000003/000000000042/a/b", "../x"])
def test_foreign_names_belong_to_no_checkpoint(name: str) -> None:
    assert CheckpointPath.of(name) is None


def test_longest_names_fit_a_file_system() -> None:
    name = CheckpointPath("s" * 64, 1, 1).snapshot("o" * 64, "v" * 64 + ".bounds", 99999, "t" * 64)
    assert max(map(len, name.split("/"))) <= 255
    assert check_object_name(name) == name


@pytest.mark.parametrize(
    "build",
    [
        lambda: CheckpointPath("../x", 1, 1),
        lambda: CheckpointPath("s", -1, 1),
        lambda: CheckpointPath("s", 1, 10**12),
        lambda: CheckpointPath("s", 1, 1).segment("a/b"),
        lambda: CheckpointPath("s", 1, 1).segment("../a"),
        lambda: CheckpointPath("s", 1, 1).base("a", "b", -1, 0),
        lambda: CheckpointPath("s", 1, 1).base("a", "v", 0, "../x"),
        lambda: CheckpointPath("s", 1, 1).base("a", "..", 0, 0),
        lambda: CheckpointPath("s", 1, 1).base("a", "", 0, 0),
        lambda: LocalLayout(Path("/w")).work("../x", 1),
        lambda: LocalLayout(Path("/w")).state("s", 1, "../x", 0),
        lambda: LocalLayout(Path("/w")).sink(".."),
    ],
)
def test_names_that_lead_elsewhere_are_refused(build) -> None:
    with pytest.raises(UsageError):
        build()


def test_local_layout() -> None:
    layout = LocalLayout(Path("/w"))
    assert layout.objects == Path("/w/objects")
    assert layout.catalog == Path("/w/catalog.db")
    assert layout.state("s", 2, "op", 3) == Path("/w/work/s/00000002/state/op/00003")
    assert layout.spark_log("s", 2) == Path("/w/work/s/00000002/spark")
    assert layout.sink("s") == Path("/w/sink/s")


@pytest.mark.parametrize("url", ["s4://b/x", "file://elsewhere/x", "", "file://", "file:///x?y=1", "a\0b"])
def test_bad_urls(url: str) -> None:
    for build in (open_store, Warehouse.at):
        with pytest.raises(UsageError, match=r"file://"):
            build(url)


def test_path_and_file_url_name_the_same_warehouse(tmp_path: Path) -> None:
    odd = tmp_path / "a b#c%20ü"
    warehouse = Warehouse.at(str(odd))
    assert warehouse == Warehouse.at(warehouse.url) == copy.copy(warehouse)
    assert warehouse.local.root == odd
    assert warehouse.store.url == (odd / "objects").as_uri()
    assert warehouse.catalog_url == f"sqlite:///{odd}/catalog.db"
    stored = warehouse.store.put("a", b"x")
    assert open_store(warehouse.store.url).read(stored).to_pybytes() == b"x"


def test_relative_path_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert Warehouse.at("./w").local.root == tmp_path / "w"


def test_prepare_makes_it_and_reading_needs_it(tmp_path: Path) -> None:
    warehouse = Warehouse.at(str(tmp_path / "w"))
    with pytest.raises(UsageError, match="no warehouse at"):
        warehouse.check_readable()
    assert not (tmp_path / "w").exists()
    warehouse.prepare()
    warehouse.prepare()
    warehouse.check_readable()


@pytest.mark.parametrize("below", ["", "/w", "/w/x"])
def test_a_file_is_no_warehouse(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("mine")
    warehouse = Warehouse.at(f"{tmp_path}/file{below}")
    for check in (warehouse.check_readable, warehouse.prepare):
        with pytest.raises(UsageError, match="file is a file"):
            check()
    assert (tmp_path / "file").read_text() == "mine"


def test_missing_parent(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"make the directory .*/no first"):
        Warehouse.at(f"{tmp_path}/no/w").prepare()
    assert list(tmp_path.iterdir()) == []


def test_unwritable(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    (tmp_path / "open" / "w").mkdir(mode=0o555)
    mode, was = tmp_path.parent.parent.stat().st_mode, os.geteuid()
    warehouse = Warehouse.at(f"{tmp_path}/open/w")
    below = Warehouse.at(f"{tmp_path}/open/w/new")
    if was == 0:
        os.seteuid(65534)
    try:
        for unwritable in (warehouse, below):
            with pytest.raises(SiltstoneError, match=r"permissions") as caught:
                unwritable.prepare()
            assert caught.type is Unreachable
    finally:
        os.seteuid(was)
    assert tmp_path.parent.parent.stat().st_mode == mode
    assert list((tmp_path / "open" / "w").iterdir()) == []


REMOTE = [
    "s3://bucket/some/prefix?endpoint=http://127.0.0.1:9&region=x",
    "redis://someone@127.0.0.1:1/3?prefix=a&password_variable=hush",
    "redis://127.0.0.1:1/3?prefix=b",
    "cassandra://someone@127.0.0.1,127.0.0.2:1/k?password_variable=hush",
]


@pytest.mark.parametrize("url", REMOTE)
def test_a_warehouse_elsewhere_keeps_what_is_of_this_machine_in_the_state_directory(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    warehouse = Warehouse.at(url)
    assert warehouse.remote and warehouse == Warehouse.at(warehouse.url)
    assert warehouse.local.root.parent == tmp_path / "state" / "siltstone"
    assert warehouse.store.url == url
    assert warehouse.catalog_url == f"sqlite:///{warehouse.local.root}/catalog.db"
    for shown in (warehouse.label, warehouse.store.label, str(warehouse.local.root), warehouse.catalog_url):
        assert "hush" not in shown and "endpoint" not in shown
    assert not (tmp_path / "state").exists()


def test_warehouses_elsewhere_share_no_local_directory_but_users_of_one_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    assert len({Warehouse.at(url).local.root for url in REMOTE}) == len(REMOTE)
    roots = {Warehouse.at(f"redis://{user}h/0").local.root for user in ("", "x@", "y@")}
    assert len(roots) == 1
    assert roots.pop().is_relative_to(Path.home() / ".local" / "state" / "siltstone")


def test_the_local_directory_of_a_warehouse_elsewhere_can_be_named(tmp_path: Path) -> None:
    warehouse = Warehouse.at(f"s3://bucket/p?local={tmp_path}/here&region=x")
    assert warehouse.local.root == tmp_path / "here"
    assert warehouse.store.url == "s3://bucket/p?region=x"
    with pytest.raises(UsageError, match="local is given twice"):
        Warehouse.at("s3://bucket/p?local=a&local=b")


def test_a_rocksdb_warehouse_is_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for url in (f"rocksdb://{tmp_path}/w?chunk_bytes=4096", "rocksdb://w?chunk_bytes=4096"):
        warehouse = Warehouse.at(url)
        assert (warehouse.local.root, warehouse.remote) == (tmp_path / "w", False)
        assert warehouse.store.url == f"rocksdb://{tmp_path}/w/objects?chunk_bytes=4096"


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("s3://bucket?nonsense=1", "no option 'nonsense': use .*endpoint"),
        ("redis://h/0?attempts=none", "option attempts"),
        ("cassandra://h/k?consistency=ANY", "option consistency"),
        ("rocksdb://w?chunk_bytes=0", "option chunk_bytes"),
        ("gopher://h", "scheme 'gopher' is unknown: use a path, file://"),
        ("s3://", "bucket"),
    ],
)
def test_a_url_that_makes_no_sense_is_refused_before_anything_is_reached(url: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Warehouse.at(url)
