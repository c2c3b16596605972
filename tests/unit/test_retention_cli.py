"""Retention and savepoints from the command line: what it prints, and that a mistake changes nothing."""

import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from siltstone.catalog.open import open_catalog
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.inspect import list_checkpoints
from siltstone.chains.policies import PolicyOptions, policy_by_name
from siltstone.operator import Operator, Rows, State, ValueState
from siltstone.store.open import Warehouse
from siltstone.stream import Stream
from tests.catalog_cases import firsts
from tests.command_line import plain, siltstone
from tests.places import place_at
from tests.proofs import failures
from tests.region_run import RegionRun
from tests.stored import stream_objects

NAME = "seen"
POLICY = policy_by_name("marginal-cost", PolicyOptions(d_max=3, size_ratio_max=None))


class Seen(Operator):
    """The last `n` of each key."""

    key = {"k": pa.int64()}  # noqa: RUF012
    last = ValueState(value={"n": pa.int64()})

    def process(self, rows: Rows, state: State) -> None:
        state.last.put(rows.keys, {"n": np.full(len(rows.keys), rows.table.column("n")[0].as_py())})


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project whose stream has six checkpoints, of 50 days ago, 40 and so on until now; bases at 1 and 5."""
    path = tmp_path_factory.mktemp("project")
    (path / "siltstone.toml").write_text('warehouse = "w"\n')
    now = datetime.now(UTC)
    times = iter([now - timedelta(days=50 - 10 * n) for n in range(6)])
    stream = Stream(NAME, source=lambda spark, _: spark.sql(""), operators=[Seen(name="by_key")], max_parallelism=4)
    time = [now - timedelta(days=60)]
    with place_at(path / "w", lambda: time[0]) as place:
        run = RegionRun(place, stream, POLICY)
        for n, time[0] in enumerate(times):
            keys = np.arange(50 if n == 0 else 5)
            run.step(pa.table({"k": keys, "n": np.full(len(keys), n)}))
        assert [*firsts(place.catalog, NAME).values()] == [1, 1, 1, 1, 5, 5]
        place.catalog.streams.register("idle", 4, {})
    return path


@pytest.fixture(autouse=True)
def project(written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the project, to be in."""
    shutil.copytree(written, tmp_path / "project")
    monkeypatch.chdir(tmp_path / "project")
    return tmp_path / "project"


def contents() -> tuple[Any, ...]:
    """All that a command that fails must leave alone."""
    with OpenWarehouse.open_existing("w") as place:
        objects = sorted(stream_objects(place.warehouse.store))
        return (
            objects,
            place.catalog.checkpoints.list_retained(NAME),
            place.catalog.savepoints.list(NAME),
            place.catalog.tombstones.list(NAME),
        )


def visible() -> list[int]:
    """What is to be seen; it proves, and the store holds just what the catalog names."""
    with OpenWarehouse.open_existing("w") as place:
        assert not failures(place, NAME)
        policy_by_name = sorted((o.name, o.bytes) for o in place.catalog.objects.list(NAME))
        assert sorted(stream_objects(place.warehouse.store)) == policy_by_name
        return [c["id"] for c in list_checkpoints(place.catalog, NAME)]


@pytest.mark.slow
def test_truncate() -> None:
    before = contents()
    foretold = siltstone("truncate", NAME, "--keep-last", 1, "--keep-within", "15d", "--dry-run", "--json").json
    assert contents() == before
    done = siltstone("truncate", NAME, "--keep-last", 1, "--keep-within", "15d", "--json").json
    assert foretold | {"dry_run": False} == done
    assert list(done) == [
        "stream",
        "dry_run",
        "kept",
        "deleted",
        "waiting",
        "leased",
        "objects",
        "bytes",
        "rules",
        "left",
    ]
    assert done["kept"] == [
        {"checkpoint": 5, "reasons": ["within"]},
        {"checkpoint": 6, "reasons": ["newest", "last", "within"]},
    ]
    assert (done["stream"], done["deleted"], done["waiting"], done["leased"]) == (NAME, [1, 2, 3, 4], [], [])
    freed = dict(before[0]).items() - dict(contents()[0]).items()
    assert (done["objects"], done["bytes"]) == (len(freed), sum(size for _, size in freed))
    assert visible() == [5, 6]
    again = siltstone("truncate", NAME, "--keep-last", 1, "--keep-within", "15d", "--json").json
    assert (again["kept"], again["deleted"], again["objects"]) == (done["kept"], [], 0)


@pytest.mark.slow
def test_deletions_lists_what_each_pass_took_away() -> None:
    assert siltstone("deletions", NAME, "--json").json == {"stream": NAME, "deletions": []}
    truncated = siltstone("truncate", NAME, "--keep-last", 3, "--json").json
    deleted = siltstone("delete", NAME, 4, "--json").json
    assert truncated["deleted"] == [] and deleted["deleted"] == [1, 2, 3, 4]
    first, second = siltstone("deletions", NAME, "--json").json["deletions"]
    assert (first["what"], second["what"]) == (
        "of a checkpoint that retention does not keep",
        "of a deleted checkpoint",
    )
    assert (first["checkpoints"], second["checkpoints"]) == (3, 1), "as they were marked"
    assert (first["objects"], first["bytes"]) == (truncated["objects"], truncated["bytes"])
    assert (second["objects"], second["bytes"]) == (deleted["objects"], deleted["bytes"]) and deleted["objects"]
    assert list(second) == ["stream", "id", "what", "who", "began_at", "checkpoints", "objects", "bytes", "rows"]
    assert siltstone("deletions", NAME, "--limit", 1, "--json").json["deletions"] == [second]
    head, _, line = plain(siltstone("deletions", NAME))
    assert head.split()[0] == "began" and line.split()[0] == second["began_at"]
    assert "of a deleted checkpoint" in line and second["who"] in line
    siltstone("deletions", "nosuch").failed(2, "no stream 'nosuch'")


@pytest.mark.slow
def test_outputs_tells_up_to_where_all_sinks_have_their_rows() -> None:
    told = siltstone("outputs", NAME, "--json").json
    assert told == {"stream": NAME, "consistent": visible()[-1], "outputs": []}
    assert f"all sinks have their rows up to checkpoint {visible()[-1]}" in siltstone("outputs", NAME).out
    siltstone("outputs", "nosuch").failed(2, "no stream 'nosuch'")


@pytest.mark.slow
def test_truncate_for_people() -> None:
    siltstone("savepoint", NAME, "stable", "--at", 3)
    before = contents()
    head, *lines, last = plain(siltstone("truncate", NAME, "--keep-last", 2, "--keep-daily", 1, "--dry-run"))
    assert head.split() == ["id", "outcome"]
    day = before[1][-1].committed_at.strftime("%Y-%m-%d")
    assert [" ".join(line.split()) for line in lines] == [
        "1 would wait for 3, which builds on it",
        "2 would wait for 3, which builds on it",
        "3 kept: savepoint stable",
        "4 would be deleted",
        "5 kept: last",
        f"6 kept: newest, last, daily {day}",
    ]
    assert last.startswith(
        f"{NAME}: 3 checkpoints would be kept, 1 would be deleted, 2 would wait for others, 2 objects, "
    )
    assert contents() == before
    [line] = plain(siltstone("truncate", NAME, "--keep-last", 2, "--keep-daily", 1))
    assert line == last.replace("would be ", "").replace("would wait", "wait")
    assert visible() == [3, 5, 6]


@pytest.mark.slow
def test_rules_of_the_file_are_replaced_one_by_one(project: Path) -> None:
    with OpenWarehouse.open_existing("w") as place:
        place.catalog.streams.set_retention(NAME, None)
    [line] = plain(siltstone("truncate", NAME))
    assert "6 checkpoints kept, 0 deleted" in line and line.endswith(
        "no rule is set: set one by an option (--keep-last) or by siltstone retention"
    )
    (project / "siltstone.toml").write_text('warehouse = "w"\n[retention]\nkeep_last = 1\nkeep_within = "45d"\n')
    kept = siltstone("truncate", NAME, "--dry-run", "--json").json["kept"]
    assert [k["checkpoint"] for k in kept] == [2, 3, 4, 5, 6]
    kept = siltstone("truncate", NAME, "--keep-within", "25d", "--dry-run", "--json").json["kept"]
    assert [(k["checkpoint"], k["reasons"][-1]) for k in kept] == [(4, "within"), (5, "within"), (6, "within")]
    (project / "siltstone.toml").write_text('warehouse = "w"\n[retention]\nmin_count = 4\nmin_age = "25d"\n')
    kept = siltstone("truncate", NAME, "--keep-last", 1, "--json").json["kept"]
    assert [k["checkpoint"] for k in kept] == visible() == [3, 4, 5, 6]


@pytest.mark.slow
def test_a_new_stream_keeps_so_much_until_it_is_told_otherwise(project: Path) -> None:
    default = {"keep_last": 100, "keep_hourly": 48, "keep_daily": 30}
    found = siltstone("retention", NAME, "--json").json
    assert found == {
        "stream": NAME,
        "recorded": default,
        "in_force": default,
        "from": "recorded with the stream",
        "described": "keep_last 100, keep_hourly 48, keep_daily 30",
    }
    [line] = plain(siltstone("retention", NAME, "--keep-last", 2, "--keep-within", "15d"))
    assert line == f"{NAME}: keep_last 2, keep_within 1296000s (recorded with the stream)"
    assert siltstone("truncate", NAME, "--dry-run", "--json").json["deleted"] == [1, 2, 3, 4]
    done = siltstone("truncate", NAME, "--keep-last", 4, "--dry-run", "--json").json
    assert [k["checkpoint"] for k in done["kept"]] == [3, 4, 5, 6], "rules that are given stand in for all recorded"
    (project / "siltstone.toml").write_text('warehouse = "w"\n[retention]\nmin_count = 3\n')
    assert [k["checkpoint"] for k in siltstone("truncate", NAME, "--dry-run", "--json").json["kept"]] == [4, 5, 6]
    (project / "siltstone.toml").write_text('warehouse = "w"\n[retention]\nkeep_all = true\n')
    [line] = plain(siltstone("retention", NAME))
    assert line == f"{NAME}: keep_all True ([retention] in the settings)"
    assert siltstone("truncate", NAME, "--json").json["deleted"] == [] and len(visible()) == 6
    siltstone("retention", NAME, "--keep-last", "-1").failed(2, "--keep-last")
    siltstone("retention", NAME, "--keep-within", "soon").failed(2, "'soon'")
    siltstone("retention", "nosuch", "--keep-all").failed(2, "no stream 'nosuch'")
    assert siltstone("retention", NAME, "--json").json["recorded"] == {"keep_last": 2, "keep_within": "1296000s"}


def test_savepoints() -> None:
    made = siltstone("savepoint", NAME, "before-upgrade", "--at", 2, "--expires", "4w", "--json").json
    assert list(made) == ["stream", "name", "checkpoint", "created_at", "expires_at", "expired"]
    assert (made["stream"], made["name"], made["checkpoint"], made["expired"]) == (NAME, "before-upgrade", 2, False)
    lasts = datetime.fromisoformat(made["expires_at"]) - datetime.fromisoformat(made["created_at"])
    assert lasts == timedelta(weeks=4)
    [line] = plain(siltstone("savepoint", NAME, "stable"))
    assert line == f"{NAME}: savepoint stable keeps checkpoint 6 until it is dropped"
    listed = siltstone("savepoints", NAME, "--json").json
    assert listed["stream"] == NAME and [s["name"] for s in listed["savepoints"]] == ["before-upgrade", "stable"]
    head, first, second = plain(siltstone("savepoints", NAME))
    assert head.split() == ["name", "checkpoint", "created", "expires"]
    assert first.split() == ["before-upgrade", "2", made["created_at"], made["expires_at"]]
    assert second.split()[::3] == ["stable", "never"]
    assert siltstone("show", NAME, "before-upgrade", "--json").json["checkpoint"] == 2
    assert siltstone("savepoint", NAME, "same", "--at", "before-upgrade", "--json").json["checkpoint"] == 2
    siltstone("delete", NAME, 1, 2).failed(2, "checkpoint 2 of stream seen is kept by its savepoint", "--drop")
    [line] = plain(siltstone("savepoint", NAME, "same", "--drop"))
    assert line == f"{NAME}: savepoint same dropped"
    dropped = siltstone("savepoint", NAME, "before-upgrade", "--drop", "--json").json
    assert dropped == {"stream": NAME, "name": "before-upgrade", "dropped": True}
    assert siltstone("delete", NAME, 1, 2, 3, 4, "--json").json["deleted"] == [1, 2, 3, 4]
    assert visible() == [5, 6]


def test_an_expired_savepoint_is_listed_as_such() -> None:
    warehouse = Warehouse.at("w")
    a_year_ago = datetime.now(UTC) - timedelta(days=365)
    with open_catalog(warehouse.catalog_url, now=lambda: a_year_ago) as catalog:
        catalog.savepoints.add(NAME, 1, "old", 2, timedelta(days=30))
    assert siltstone("savepoints", NAME, "--json").json["savepoints"][0]["expired"] is True
    [_, line] = plain(siltstone("savepoints", NAME))
    assert line.rstrip().endswith("(expired)")
    siltstone("savepoint", NAME, "old").failed(2, "has a savepoint old already, of checkpoint 2", "drop it")
    assert siltstone("truncate", NAME, "--keep-last", 2, "--json").json["deleted"] == [1, 2, 3, 4]
    assert siltstone("savepoints", NAME, "--json").json["savepoints"] == []
    assert visible() == [5, 6]


MISTAKES: list[tuple[str, tuple[str, ...]]] = [
    ("truncate", ("Missing argument 'STREAM'",)),
    ("truncate nosuch --keep-last 1", ("no stream 'nosuch' in this catalog: it has idle, seen",)),
    ("truncate nosuch", ("no stream 'nosuch'",)),
    ("truncate ../x --keep-last 1", ("'../x' is not a stream name",)),
    ("truncate idle --keep-last 1", ("stream idle: it has none yet, run it first",)),
    ("truncate idle --dry-run", ("stream idle: it has none yet, run it first",)),
    ("truncate seen --keep-last 0", ("keep none of 6 checkpoints (keep_last 0)", "keep more")),
    ("truncate seen --keep-within 0s --dry-run", ("keep none of 6 checkpoints",)),
    ("truncate seen --keep-daily 0 --keep-weekly 0", ("(keep_daily 0, keep_weekly 0)",)),
    ("truncate seen --keep-last -1", ("--keep-last",)),
    ("truncate seen --keep-last many", ("--keep-last",)),
    ("truncate seen --keep-within 7", ("'7' is not a length of time: write it like 90s",)),
    ("truncate seen --keep-within 7y", ("'7y' is not a length of time",)),
    ("truncate seen --keep-yearly 1", ("No such option: --keep-yearly",)),
    ("truncate seen --keep-last 1 --warehouse missing", ("no warehouse at", "missing")),
    ("savepoint seen", ("Missing argument 'NAME'",)),
    ("savepoint nosuch new", ("no stream 'nosuch'",)),
    ("savepoint nosuch new --drop", ("no stream 'nosuch'",)),
    ("savepoint idle new", ("stream idle: it has none yet, run it first",)),
    ("savepoint idle new --drop", ("stream idle: it has none yet, run it first",)),
    ("savepoint seen kept", ("has a savepoint kept already, of checkpoint 2", "drop it first")),
    ("savepoint seen latest", ("cannot be named latest",)),
    ("savepoint seen 4", ("'4' is not a savepoint name",)),
    ("savepoint seen 2013-07-04", ("'2013-07-04' is not a savepoint name",)),
    ("savepoint seen ../x", ("'../x' is not a savepoint name",)),
    ("savepoint seen Stable", ("'Stable' is not a savepoint name",)),
    ("savepoint seen new --at 9", ("no checkpoint 9 of stream seen: it has 6, 1 to 6",)),
    ("savepoint seen new --at nightly", ("'nightly' is not a checkpoint: use latest, an id, a savepoint (kept), or",)),
    ("savepoint seen new --expires soon", ("'soon' is not a length of time",)),
    ("savepoint seen new --expires -1d", ("'-1d' is not a length of time",)),
    ("savepoint seen new --expires 0s", ("would have expired already",)),
    ("savepoint seen new --expires 99999999d", ("savepoint new cannot expire in",)),
    ("savepoint seen new --drop", ("no savepoint 'new' of stream seen: it has kept",)),
    ("savepoint seen kept --drop --at 2", ("--drop takes only the name",)),
    ("savepoint seen kept --drop --expires 1d", ("--drop takes only the name",)),
    ("savepoints nosuch", ("no stream 'nosuch'",)),
    ("delete seen 1 2", ("checkpoint 2 of stream seen is kept by its savepoint kept",)),
]


@pytest.mark.slow
def test_a_mistake_is_one_line_and_changes_nothing() -> None:
    assert siltstone("savepoint", NAME, "kept", "--at", 2).code == 0
    before = contents()
    for line, said in MISTAKES:
        siltstone(*line.split()).failed(2, *said)
        assert contents() == before, line


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("keep_last = -1", "option retention.keep_last: "),
        ('keep_within = "soon"', "'soon' is not a length of time"),
        ("min_age = 3600", "3600 is not a length of time"),
        ("keep_yearly = 1", "option retention.keep_yearly: "),
    ],
)
def test_a_mistake_in_the_file_is_one_line_and_changes_nothing(text: str, said: str, project: Path) -> None:
    before = contents()
    (project / "siltstone.toml").write_text(f'warehouse = "w"\n[retention]\n{text}\n')
    siltstone("truncate", NAME).failed(2, said)
    assert contents() == before
