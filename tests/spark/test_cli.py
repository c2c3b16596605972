"""The command line as users see it: what it prints, what it ends with, and that a mistake changes nothing."""

import os
import re
import socket
from importlib import metadata
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from pyspark.sql import SparkSession

from tests.command_line import CONFIGURATION, ROOT, contents, plain, siltstone

CHECKPOINTS = 4
DIGEST = r"[0-9a-f]{32}"
COMMANDS = ["run", "checkpoints", "show", "report", "restore", "restore-series", "verify"]
COMMANDS += ["snapshot", "delete"]
COMMANDS += ["materialize", "truncate", "retention", "savepoint", "savepoints", "deletions", "outputs"]
COMMANDS += ["sweep", "optimize", "fork", "rescale", "edit", "export-savepoint", "import-savepoint"]
COMMANDS += [
    "recover",
    "reidentify",
    "replay",
    "doctor",
    "upgrade",
    "backup",
    "restore-catalog",
    "rebuild-catalog",
    "init",
    "demo",
    "ui",
]


@pytest.fixture(scope="module")
def project(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a siltstone.toml and a warehouse: the first batches of the stream `little`, in two runs."""
    path = tmp_path_factory.mktemp("project")
    (path / "siltstone.toml").write_text(CONFIGURATION)
    first = siltstone("run", "little", "--batches", 3, "--json", cwd=path).json
    counts = ["rows", "bytes", "seconds", "uploads", "dead_letters", "late"]
    fields = ["stream", "checkpoints", "digest", *counts, "recovered", "resets", "stopped", "waited_s", "autonomous"]
    assert list(first) == fields
    assert first["uploads"]["objects"] >= 3 and first["uploads"]["failures"] == 0 < first["uploads"]["latency_p999_s"]
    assert (first["stream"], first["checkpoints"], first["rows"]) == ("little", [1, 2, 3], 900)
    second = siltstone("run", "little", "--batches", 1, "--parallelism", 1, cwd=path)
    assert (second.code, second.err) == (0, "")
    [line] = second.out.splitlines()
    assert line.startswith("little: 1 checkpoints, 300 rows, ") and " digest " in line
    return path


@pytest.fixture(autouse=True)
def inside(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test is in the project, as a user would be."""
    monkeypatch.chdir(project)


def test_checkpoints() -> None:
    found = siltstone("checkpoints", "little", "--json").json
    assert list(found) == ["stream", "forked_from", "forked_at", "checkpoints", "materialization"]
    assert [c["id"] for c in found["checkpoints"]] == [1, 2, 3, 4]
    fields = ["id", "forms", "tables", "bytes", "D", "rows", "amplification", "digest", "proven", "proof"]
    fields += ["event_time_max", "committed_at", "edit", "dropped"]
    assert all(list(c) == fields for c in found["checkpoints"])
    newest = found["checkpoints"][-1]
    assert set(newest["forms"]) == set(newest["D"]) == set(newest["tables"]) == {"accounts", "daily", "places"}
    assert {of["form"] for of in newest["tables"]["daily"].values()} == {newest["forms"]["daily"]}
    assert newest["event_time_max"].startswith("2020-01-01T") and newest["event_time_max"].endswith("+00:00")
    limited = siltstone("checkpoints", "little", "--limit", 2, "--json").json
    assert limited["checkpoints"] == found["checkpoints"][2:]
    head, *lines, said = plain(siltstone("checkpoints", "little"))
    assert head.split()[:4] == ["id", "forms", "bytes", "D"] and len(lines) == CHECKPOINTS
    assert said.startswith("materialization: accounts fine (")


def test_show() -> None:
    found = siltstone("show", "little", "latest", "--json").json
    assert found["checkpoint"] == CHECKPOINTS and found["epoch"] == 2 and found["chain"][-1] == CHECKPOINTS
    assert {h["operator"] for h in found["handles"]} == {"accounts", "daily", "places"}
    assert all((Path("w") / "objects" / h["object"]).is_file() for h in found["handles"])
    fields = ["operator", "variable", "form", "step", "key_groups", "rows", "bytes", "offset", "previous", "object"]
    fields += ["checksum"]
    assert all(list(h) == fields for h in found["handles"])
    assert found["steps"][0]["batch"] == 3
    same = siltstone("show", "little", found["committed_at"].replace("+00:00", "") + ".999999Z", "--json").json
    assert same["checkpoint"] == CHECKPOINTS
    lines = plain(siltstone("show", "little", "4"))
    assert lines[0] == f"checkpoint 4 of little, epoch 2, chain {found['chain']}"


def test_restore(tmp_path: Path) -> None:
    wanted = siltstone("checkpoints", "little", "--json").json["checkpoints"]
    found = siltstone("restore", "little", "--to", tmp_path / "out", "--json").json
    assert list(found) == ["stream", "checkpoint", "rows", "bytes", "seconds", "digest", "proven", "path"]
    assert (found["checkpoint"], found["digest"], found["proven"]) == (4, wanted[-1]["digest"], True)
    assert found["path"] == str(tmp_path / "out")
    tables = [p for p in (tmp_path / "out").glob("*/*") if "value" not in pq.read_schema(next(p.iterdir())).names]
    assert sum(pq.read_table(p).num_rows for p in tables) == found["rows"] == wanted[-1]["rows"]
    [line] = plain(siltstone("restore", "little", "--at", 2, "--parallelism", 3))
    assert line.startswith("little: checkpoint 2 restored: ") and line.endswith(f"proven, digest {wanted[1]['digest']}")
    siltstone("savepoint", "little", "second", "--at", 2)
    assert siltstone("restore", "little", "--at", "second", "--json").json["digest"] == wanted[1]["digest"]
    assert siltstone("verify", "little", "--at", "second", "--json").json["proven"] == [2]
    siltstone("savepoint", "little", "second", "--drop")
    as_of = wanted[1]["event_time_max"]
    assert siltstone("restore", "little", "--as-of", as_of, "--json").json["digest"] == wanted[1]["digest"]


def test_snapshot_and_verify(project: Path) -> None:
    siltstone("verify", "little", "--deep").failed(2, "no snapshot of little", "siltstone snapshot little")
    found = siltstone("verify", "little", "--all", "--json").json
    assert list(found) == ["stream", "proven", "failed", "seconds", "stalled"]
    assert (found["proven"], found["failed"], found["stalled"]) == ([1, 2, 3, 4], [], [])
    assert all(c["proven"] for c in siltstone("checkpoints", "little", "--json").json["checkpoints"])
    [line] = plain(siltstone("verify", "little", "--at", "2"))
    assert line.startswith("little: 1 checkpoints proven, 0 not, ")
    taken = siltstone("snapshot", "little", "--json").json
    assert list(taken) == ["stream", "checkpoint", "rows", "bytes", "seconds"] and taken["checkpoint"] == 4
    before = contents(project / "w")
    siltstone("snapshot", "little").failed(2, "checkpoint 4 of little already has a snapshot")
    assert contents(project / "w") == before
    assert siltstone("verify", "little", "--deep", "--json").json["proven"] == [4]


def test_report(tmp_path: Path) -> None:
    found = siltstone("report", "little", "--out", tmp_path / "chain.svg", "--json").json
    assert found["picture"] == str(tmp_path / "chain.svg") and (tmp_path / "chain.svg").stat().st_size > 10_000
    assert found["stream"] == "little" and [c["id"] for c in found["checkpoints"]] == [1, 2, 3, 4]
    assert {"bytes", "rows", "chain_bytes", "restore_bound_seconds"} <= set(found["checkpoints"][0])
    lines = plain(siltstone("report", "little", "--out", tmp_path / "chain.png"))
    assert lines[0].startswith("little: 4 checkpoints, ") and lines[-1] == f"picture: {tmp_path / 'chain.png'}"


def test_help() -> None:
    whole = siltstone("--help")
    assert whole.code == 0 and not whole.err
    groups = whole.out.partition("Run and look:")[2]
    lines = [line.split()[0] for line in groups.splitlines() if line.startswith("  ") and line[2] != " "]
    assert lines == COMMANDS and "..." not in groups
    assert siltstone("--version").out == f"siltstone {metadata.version('siltstone')}\n"
    nothing = siltstone()
    assert (nothing.code, nothing.out) == (2, "") and "Run and look:" in nothing.err
    for command in COMMANDS:
        page = siltstone(command, "--help")
        assert page.code == 0 and page.out.startswith(f"Usage: siltstone {command} [OPTIONS]")
        assert "--warehouse URL" in page.out or command == "init"  # which makes a project, and no warehouse


MISTAKES: list[tuple[str, tuple[str, ...]]] = [
    ("bogus", ("No such command 'bogus'", "siltstone --help")),
    ("run little --bogus", ("No such option: --bogus", "siltstone run --help")),
    ("run", ("Missing argument 'STREAM'",)),
    ("run little extra", ("extra",)),
    ("run little --batches 0", ("--batches",)),
    ("run nosuch", ("no stream 'nosuch' is defined", "little")),
    ("checkpoints nosuch", ("no stream 'nosuch' in this catalog: it has little",)),
    ("snapshot nosuch", ("no stream 'nosuch'",)),
    ("report nosuch", ("no stream 'nosuch'",)),
    ("verify nosuch --all", ("no stream 'nosuch'",)),
    ("show little 99", ("no checkpoint 99", "1", "4")),
    ("show little 0", ("no checkpoint 0",)),
    ("show little yesterday", ("'yesterday' is not a checkpoint", "a savepoint", "ISO time")),
    ("show little 99999999999999999999999", ("no checkpoint",)),
    ("restore little --at 99", ("no checkpoint 99",)),
    ("restore little --at 2000-01-01", ("no checkpoint as old as 2000-01-01",)),
    ("restore little --as-of 2000-01-01", ("no checkpoint of events up to 2000-01-01",)),
    ("restore little --as-of noon", ("noon",)),
    ("restore little --at 1 --as-of 2020-01-02", ("at and as_of exclude each other",)),
    ("restore little --to w", ("exists already: name a directory that does not",)),
    ("restore little --to missing/out", ("make the directory", "missing")),
    ("verify little --at 99", ("no checkpoint 99",)),
    ("verify little --at 1 --all", ("at and every exclude each other",)),
    ("report little --out chain.bad", ("chain.bad is not the name of a picture", ".png")),
    ("report little --out missing/chain.png", ("missing",)),
    *(
        (f"{command} ../x", ("'../x'",))
        for command in ("run", "checkpoints", "restore", "verify", "snapshot", "report")
    ),
    ("show ../x 1", ("'../x'",)),
    ("run little --warehouse siltstone.toml", ("the warehouse", "siltstone.toml is a file")),
    ("checkpoints little --warehouse siltstone.toml", ("siltstone.toml is a file",)),
    ("run little --warehouse missing/w", ("cannot make the warehouse", "make the directory", "missing")),
    ("checkpoints little --warehouse missing", ("no warehouse at", "missing")),
    ("run little --warehouse s4://bucket", ("scheme 's4' is unknown", "s3://")),
    ("run little --catalog mysql://me:hidden@host/db", ("a catalog cannot be kept in mysql",)),
    ("checkpoints little --catalog sqlite:///other.db", ("no catalog at sqlite:///",)),
    ("run little --policy bogus", ("'bogus' is not a checkpoint policy", "marginal-cost, adjust-d")),
    ("run little --backend bogus", ("backend", "'heap' or 'rocksdb'")),
    ("run little --parallelism 0", ("parallelism",)),
    ("run little --parallelism -2", ("parallelism",)),
    ("run little --parallelism 17", ("parallelism is 17: use 1 to max_parallelism 16",)),
    ("run little --checkpoint-steps 0", ("checkpoint_steps",)),
    ("run little --checkpoint-s -1", ("checkpoint_s",)),
    ("run little --set file=6", ("no source option 'file'", "files")),
    ("run little --set files", ("files: write it as NAME=VALUE",)),
    ("run little --set files=3", ("started with other values of the source options files",)),
]


@pytest.mark.parametrize(("line", "said"), MISTAKES, ids=[line for line, _ in MISTAKES])
def test_a_mistake_is_one_line_and_changes_nothing(line: str, said: tuple[str, ...], project: Path) -> None:
    before, names = contents(project / "w"), sorted(os.listdir())
    ended = siltstone(*line.split())
    ended.failed(2, *said)
    assert "hidden" not in ended.err
    assert contents(project / "w") == before and sorted(os.listdir()) == names


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('streams = ["tests.spark_streams"', "siltstone.toml cannot be read"),
        ("bogus = 1", "bogus"),
        ('parallelism = "many"', "parallelism"),
        ("[policy_options]\nd_max = -1", "d_max"),
        ("[policy_options]\nbogus = 1", "bogus"),
        ('streams = "tests.spark_streams"', "streams"),
        ('streams = ["no_such_module"]', "no_such_module"),
        (b"\xff\xfe", "siltstone.toml cannot be read"),
    ],
)
def test_a_malformed_configuration(text: str | bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "siltstone.toml").write_bytes(text if isinstance(text, bytes) else text.encode())
    siltstone("run", "little", cwd=tmp_path).failed(2, said)
    assert os.listdir(tmp_path) == ["siltstone.toml"]


def test_an_option_of_the_source_is_refused_before_the_stream_exists(new_project: Path) -> None:
    siltstone("run", "little", "--set", "files=x").failed(2, "files is 'x': use a number")
    siltstone("checkpoints", "little").failed(2, "no stream 'little' in this catalog: it has none yet")


def test_an_operator_that_raises(new_project: Path) -> None:
    ended = siltstone("run", "breaking")
    ended.failed(
        1, "stream breaking", "operator counts", "ZeroDivisionError: a value is negative", "spark_streams.py, line"
    )
    line = int(re.findall(r"line (\d+)\)", ended.err)[-1])
    text = (ROOT / "tests" / "spark_streams.py").read_text().splitlines()[line - 1]
    assert 'raise ZeroDivisionError("a value is negative")' in text
    assert len(siltstone("checkpoints", "breaking", "--json").json["checkpoints"]) == 1


def test_a_null_key(new_project: Path) -> None:
    siltstone("run", "nulls").failed(2, "operator counts: key column key is null in 1 of 2 rows", "in the source")
    assert len(siltstone("checkpoints", "nulls", "--json").json["checkpoints"]) == 1


def test_a_newer_writer(new_project: Path) -> None:
    siltstone("run", "overtaken").failed(4, "writer epoch 1 of stream overtaken was fenced by epoch 2")
    assert len(siltstone("checkpoints", "overtaken", "--json").json["checkpoints"]) == 2
    assert siltstone("run", "overtaken", "--json").json["checkpoints"] == [3, 4]


def test_materialize(new_project: Path) -> None:
    siltstone("materialize", "little").failed(2, "no warehouse")
    siltstone("run", "little", "--openmetrics", new_project / "no" / "m").failed(3, "cannot write the metrics to")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        siltstone("run", "little", "--metrics-port", port).failed(
            2, f"on 127.0.0.1 port {port}: Address already in use"
        )
    siltstone("run", "little", "--metrics-port", "http").failed(2, "option metrics_port", "write PORT or HOST:PORT")
    assert not (new_project / "w").exists()
    metrics = new_project / "metrics.txt"
    assert siltstone("run", "little", "--batches", 3, "--openmetrics", metrics, "--json").json["checkpoints"] == [
        1,
        2,
        3,
    ]
    families = {family.name: family for family in text_string_to_metric_families(metrics.read_text())}
    [stored] = [s for s in families["siltstone_upload_objects"].samples if s.name.endswith("_total")]
    assert stored.labels == {"stream": "little"} and stored.value >= 3
    siltstone("materialize", "little", "--operator", "nobody").failed(2, "no operator 'nobody'", "accounts, daily")
    siltstone("materialize", "little", "--at", 9).failed(2, "no checkpoint 9")
    before = siltstone("restore", "little", "--at", 3, "--json").json
    made = siltstone("materialize", "little", "--at", 3, "--json").json
    assert list(made) == ["stream", "checkpoint", "rows", "bytes", "seconds", "operators", "kept", "triggers"]
    assert made["checkpoint"] == 3 and len(made["operators"]) + len(made["kept"]) == 3
    assert made["rows"] > 0 and made["bytes"] > 0
    again = siltstone("materialize", "little", "--at", 3, "--json").json
    assert (again["operators"], again["rows"], len(again["kept"])) == ([], 0, 3)
    assert siltstone("show", "little", 3, "--json").json["chain"] == [3]
    assert siltstone("restore", "little", "--at", 3, "--json").json["digest"] == before["digest"]
    assert siltstone("run", "little", "--batches", 1, "--json").json["checkpoints"] == [4]
    assert siltstone("show", "little", 4, "--json").json["chain"] in ([3, 4], [4])
    gone = siltstone("delete", "little", 1, 2, "--json").json
    assert (gone["deleted"], gone["marked"]) == ([1, 2], [])
    proven = siltstone("verify", "little", "--all", "--json").json
    assert (proven["proven"], proven["failed"]) == ([3, 4], [])
    only = siltstone("restore", "little", "--only", "accounts", "--json").json
    assert only["proven"] and 0 < only["rows"] < siltstone("restore", "little", "--json").json["rows"]
    siltstone("restore", "little", "--only", "accounts.nothing").failed(2, "has no 'accounts.nothing'", "accounts.")
