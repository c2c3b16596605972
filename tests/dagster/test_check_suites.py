"""What is checked of a stream, without Dagster: each property holds of a sound stream and fails with the right rows."""

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest

from siltstone.catalog.records.objects import ObjectKind
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.due import materialization_health
from siltstone.chains.materialization_rules import MaterializationOptions
from siltstone.chains.materialize import materialize
from siltstone.chains.policies import PolicyOptions, policy_by_name
from siltstone.cli import main
from siltstone.dagster.checks import __main__ as command
from siltstone.dagster.checks import facts, suites
from siltstone.dagster.checks.facts import Subject
from siltstone.dagster.checks.validation import Outcome, check, validate
from siltstone.errors import Unreachable
from siltstone.format.manifests import read_manifest
from siltstone.run.snapshot import snapshot_tasks, take_snapshot
from siltstone.settings import Settings
from siltstone.sinks.delta import SinkTable
from siltstone.store.paths import CheckpointPath
from tests.fault.small_stream import SMALL, purchases
from tests.proofs import in_order
from tests.region_run import RegionRun
from tests.stateless import ALONE

STEPS = 4
POLICY = policy_by_name("adjust-d", PolicyOptions(d0=50, size_ratio_max=None, space_amplification_max=None))
"""one base, then deltas"""


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A warehouse in which everything holds: a base and three deltas, a snapshot, what a sink would show."""
    root = tmp_path_factory.mktemp("sound") / "warehouse"
    with OpenWarehouse.open_writable(str(root)) as place:
        run = RegionRun(place, SMALL, POLICY, parallelism=2)
        for rows in purchases()[:STEPS]:
            run.step(rows)
        catalog, newest = place.catalog, place.catalog.checkpoints.get_latest(SMALL.name)
        manifest = read_manifest(place.warehouse.store, newest.manifest)
        parts = [take_snapshot(task) for task in snapshot_tasks(place.warehouse, manifest, "heap", "s1")]
        objects = [stored for part in parts for stored in part.objects]
        catalog.reference_copies.add(SMALL.name, newest.epoch, newest.id, objects, sum(part.rows for part in parts))
        for id in range(1, STEPS + 1):
            _published(root, id).mkdir(parents=True)
    return root


def _published(root: Path, checkpoint: int) -> Path:
    return root / "sink" / "small" / "accounts" / f"checkpoint={checkpoint:012d}"


@dataclass
class Checked:
    """A copy of that warehouse, to be damaged."""

    root: Path

    def subject(self, **options: Any) -> Subject:
        return Subject(Settings(warehouse=str(self.root), **options), SMALL)

    def place(self) -> OpenWarehouse:
        return OpenWarehouse.open_existing(str(self.root))

    def object(self, kind: ObjectKind, checkpoint: int) -> Path:
        """An object that a checkpoint wrote."""
        with self.place() as place:
            found = [o for o in place.catalog.objects.list(SMALL.name, [checkpoint]) if o.kind is kind]
            return place.warehouse.local.objects / found[0].name

    def outcome(self, suite: suites.Suite, **options: Any) -> Outcome:
        return check(self.subject(**options), suite)


@pytest.fixture
def checked(sound: Path, tmp_path: Path) -> Checked:
    shutil.copytree(sound, tmp_path / "warehouse")
    return Checked(tmp_path / "warehouse")


def _name(path: Path) -> str:
    return path.relative_to(path.parents[3]).as_posix()


@pytest.mark.usefixtures("spark")
def test_all_hold_of_a_sound_stream(checked: Checked) -> None:
    looked_at = {}
    for suite in suites.SUITES:
        outcome = checked.outcome(suite)
        assert (outcome.holds, outcome.failing, outcome.rows) == (True, 0, []), outcome.summary
        looked_at[suite.name] = outcome.facts
    with checked.place() as place:
        stored = len({o.name for o in place.catalog.objects.list(SMALL.name)})
    assert looked_at == {
        "digest": STEPS,
        "no_gap": STEPS * 8,
        "nothing_missing": stored,
        "restore_cost": STEPS * 3,
        "space_amplification": STEPS * 3,
        "no_orphan": 0,
        "materialization_not_stalled": 3,
        "sink_agrees": STEPS,
        "restore_equals_snapshot": 9 * SMALL.max_parallelism,
    }


@pytest.mark.usefixtures("spark")
def test_a_flipped_byte_is_told_with_the_checkpoints_and_the_object(checked: Checked) -> None:
    path = checked.object(ObjectKind.SEGMENT, 3)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.chmod(0o644)
    path.write_bytes(content)
    outcome = checked.outcome(suites.PROVEN)
    assert not outcome.holds and outcome.failing == len(outcome.rows) == 2
    assert [row["checkpoint"] for row in outcome.rows] == [3, 4], "4 builds on it"
    assert {row["object"] for row in outcome.rows} == {_name(path)}
    assert _name(path) in outcome.summary and "proven True" in outcome.summary
    assert checked.outcome(suites.NOTHING_MISSING).holds, "it is there, as long as it was"


def test_a_missing_and_a_cut_object_are_told_by_name(checked: Checked) -> None:
    gone, cut = checked.object(ObjectKind.SEGMENT, 2), checked.object(ObjectKind.SEGMENT, 3)
    gone.unlink()
    cut.chmod(0o644)
    cut.write_bytes(cut.read_bytes()[:-1])
    outcome = checked.outcome(suites.NOTHING_MISSING)
    assert not outcome.holds and outcome.failing == 2
    by_name = {row["object"]: row for row in outcome.rows}
    assert by_name.keys() == {_name(gone), _name(cut)}
    missing, short = by_name[_name(gone)], by_name[_name(cut)]
    assert (missing["stored_bytes"], missing["expected"]) == (None, "stored_bytes known")
    assert short["stored_bytes"] == short["recorded_bytes"] - 1 and short["expected"] == "stored_bytes = recorded_bytes"
    assert missing["checkpoint"] == 2


def test_a_table_that_builds_on_what_is_not_there_is_a_gap(checked: Checked, monkeypatch: pytest.MonkeyPatch) -> None:
    real = facts.read_many

    def without_a_table(store: Any, stored: Any) -> Any:
        manifests = real(store, stored)
        for manifest in manifests:
            if manifest.checkpoint == 2:
                kept = tuple(h for h in manifest.handles if (h.operator, h.variable) != ("places", "best"))
                object.__setattr__(manifest, "handles", kept)
        return manifests

    monkeypatch.setattr(facts, "read_many", without_a_table)
    outcome = checked.outcome(suites.NO_GAP)
    assert not outcome.holds
    (row,) = outcome.rows
    assert (row["checkpoint"], row["operator"], row["table"], row["builds_on"]) == (3, "places", "best", 2)


def test_chains_that_begin_with_a_materialization_have_no_gap(checked: Checked) -> None:
    with checked.place() as place:
        materialize(place, SMALL.name, "places", 3, id="m1", parallelism=2, run=in_order)
    outcome = checked.outcome(suites.NO_GAP)
    assert outcome.holds, outcome.rows
    links = facts.links(checked.subject())
    assert set(links[(links.operator == "places") & (links.checkpoint == 3)].builds_on) == {0}
    assert set(links[(links.operator == "places") & (links.checkpoint == 4)].builds_on) == {3}


def test_an_orphan_is_told_with_its_reason_and_its_name(checked: Checked) -> None:
    lost = checked.root / "objects" / CheckpointPath(SMALL.name, 1, 2).prefix / "lost.segment"
    lost.write_bytes(b"12345")
    (row,) = checked.outcome(suites.NO_ORPHAN).rows
    assert (row["objects"], row["bytes"], row["examples"]) == (1, 5, _name(lost))
    assert "did without" in row["reason"]
    assert lost.exists(), "a check changes nothing"
    lost.rename(lost.with_name("4711"))
    outcome = checked.outcome(suites.NO_ORPHAN)
    assert (outcome.holds, outcome.facts) == (True, 1), "a sweep would leave what has no name of ours"


def test_a_sink_that_shows_too_little_or_too_much_is_told(checked: Checked) -> None:
    _published(checked.root, 2).rmdir()
    _published(checked.root, 9).mkdir()
    outcome = checked.outcome(suites.SINK_AGREES)
    assert [(r["checkpoint"], r["completed"], r["published"]) for r in outcome.rows] == [
        (2, True, False),
        (9, False, True),
    ]
    assert {row["sink"] for row in outcome.rows} == {"accounts"}


def test_the_log_of_a_table_says_what_it_shows(tmp_path: Path) -> None:
    """A lost transaction and one of no checkpoint are told, by the log alone."""
    stream = replace(SMALL, sinks={"accounts": None})
    subject = Subject(Settings(warehouse=str(tmp_path / "w")), stream)
    with OpenWarehouse.open_writable(str(tmp_path / "w")) as place:
        run = RegionRun(place, stream, POLICY, parallelism=2, tables=frozenset({"accounts"}))
        table = SinkTable(place.warehouse.store, stream.name, "accounts")
        for rows in purchases()[:3]:
            run.step(rows)
        first, second, third = place.catalog.outbox.list(stream.name)
        for output in (first, third):
            table.deliver(output)
        told = [(row.checkpoint, row.completed, row.published) for row in facts.sinks(subject).itertuples()]
        assert told == [(1, True, True), (2, True, False), (3, True, True)]
        table.deliver(replace(second, sink_id=9))
    assert [row.checkpoint for row in facts.sinks(subject).itertuples() if not row.completed] == [9]


def test_a_checkpoint_without_input_has_no_output_to_show(checked: Checked) -> None:
    """Such as one of a rescale: a sink never hears of it."""
    with OpenWarehouse.open_existing(str(checked.root)) as place:
        RegionRun(place, SMALL, POLICY, parallelism=3).step_without_rows()
    outcome = checked.outcome(suites.SINK_AGREES)
    assert outcome.holds and outcome.facts == STEPS


def test_a_materialization_that_fails_or_stands_still_is_told(
    checked: Checked, monkeypatch: pytest.MonkeyPatch
) -> None:
    with checked.place() as place:
        for n in range(3):
            place.catalog.materializations.begin(SMALL.name, "daily", STEPS, id=f"m{n}", who="a test")
            place.catalog.materializations.fail(SMALL.name, f"m{n}", "the disk is full")
    (row,) = checked.outcome(suites.NOT_STALLED).rows
    assert (row["operator"], row["state"], row["failures"]) == ("daily", "failing", 3)
    assert row["error"] == "the disk is full"

    def an_hour_later(catalog: Any, *rest: Any) -> Any:
        now = catalog.now() + timedelta(hours=1)
        monkeypatch.setattr(type(catalog), "now", lambda _: now)
        return materialization_health(catalog, *rest)

    monkeypatch.setattr(facts, "materialization_health", an_hour_later)
    outcome = checked.outcome(suites.NOT_STALLED, materialization=MaterializationOptions(interval_s=600))
    assert [row["state"] for row in outcome.rows] == ["stalled"] * 3


def test_a_chain_beyond_its_bounds_is_told(checked: Checked) -> None:
    tight = PolicyOptions(d_max=2, size_ratio_max=None)
    outcome = checked.outcome(suites.RESTORE_COST, policy_options=tight)
    assert {(row["checkpoint"], row["deltas"], row["most_deltas"]) for row in outcome.rows} == {(4, 3, 2)}
    assert {row["operator"] for row in outcome.rows} == {"accounts", "daily", "places"}
    outcome = checked.outcome(suites.RESTORE_COST, policy_options=PolicyOptions(size_ratio_max=0.001))
    assert {row["checkpoint"] for row in outcome.rows} == {2, 3, 4}
    assert all(row["delta_bytes"] > row["most_delta_bytes"] for row in outcome.rows)
    outcome = checked.outcome(suites.RESTORE_COST, policy_options=PolicyOptions(restore_budget_s=1e-9))
    assert {row["checkpoint"] for row in outcome.rows} == {2, 3, 4}, "a base alone is the least there can be"
    outcome = checked.outcome(suites.AMPLIFICATION, policy_options=PolicyOptions(space_amplification_max=1.0001))
    assert outcome.rows and all(row["amplification"] > row["most"] for row in outcome.rows)


@pytest.mark.usefixtures("spark")
def test_a_snapshot_that_differs_is_told_by_key_group_column_and_key(
    checked: Checked, monkeypatch: pytest.MonkeyPatch
) -> None:
    from siltstone.restore import compare as comparison

    real = comparison.read_base

    def altered(data: Any, schema: Any, groups: Any, *, name: str) -> Iterator[tuple[pa.Table, Any]]:
        for rows, owners in real(data, schema, groups, name=name):
            if "daily.totals" not in name or not rows.num_rows or 0 not in groups:
                yield rows, owners
                continue
            spent = rows.schema.field("spent")
            more = pa.array([1000, *rows["spent"].to_pylist()[1:]], spent.type)
            yield rows.set_column(rows.column_names.index("spent"), spent, more), owners

    monkeypatch.setattr(comparison, "read_base", altered)
    from siltstone.spark.operations import proving

    # In this process, where the alteration is.
    monkeypatch.setattr(proving, "spark_map", lambda _, function, tasks, **__: in_order(function, tasks))
    outcome = checked.outcome(suites.RESTORE_EQUALS_SNAPSHOT)
    assert not outcome.holds
    (row,) = outcome.rows
    assert (row["checkpoint"], row["operator"], row["table"]) == (STEPS, "daily", "totals")
    assert row["columns"] == "spent in 1" and row["key_group"] in range(SMALL.max_parallelism)
    assert row["examples"].startswith("[(")


def test_no_facts_fail_where_there_must_be_some() -> None:
    assert not validate(suites.PROVEN, pd.DataFrame()).holds
    assert validate(suites.SINK_AGREES, pd.DataFrame()).holds


Ended = tuple[int, dict[str, Any], str]


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    """`python -m checks` in this process: exit code, the JSON object, what it told people."""
    monkeypatch.setenv("SILTSTONE_STREAMS", '["tests.fault.small_stream"]')

    def run(*arguments: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["checks", *arguments])
        with pytest.raises(SystemExit) as end:
            main(command.check_command)
        printed = capsys.readouterr()
        return int(end.value.code or 0), json.loads(printed.out) if printed.out else {}, printed.err

    return run


def test_the_command_says_what_failed_and_builds_pages(
    checked: Checked, checks: Callable[..., Ended], tmp_path: Path
) -> None:
    run = partial(checks, "small", "--warehouse", str(checked.root))
    code, said, _ = run("--only", "sink_agrees", "--only", "no_gap")
    assert (code, [c["name"] for c in said["checks"]]) == (0, ["no_gap", "sink_agrees"])
    assert all(c["holds"] and c["facts"] for c in said["checks"])

    gone = checked.object(ObjectKind.SEGMENT, 2)
    gone.unlink()
    pages = tmp_path / "pages"
    code, said, told = run("--only", "nothing_missing", "--only", "sink_agrees", "--data-docs", str(pages))
    assert (code, told) == (1, "")
    by_name = {c["name"]: c for c in said["checks"]}
    assert by_name["nothing_missing"]["failing"][0]["object"] == _name(gone)
    assert by_name["sink_agrees"]["holds"]
    index = Path(said["data_docs"])
    assert index.is_file() and index.is_relative_to(pages)
    written = [page.read_text() for page in index.parent.rglob("*.html")]
    assert any(_name(gone) in page for page in written), "the page names what is missing"
    assert any("sink_agrees" in page for page in written)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nosuch"], "no stream 'nosuch' is defined"),
        (["small", "--only", "nothing"], "invalid choice"),
        (["small", "--warehouse", "/nowhere/at/all"], "no warehouse at /nowhere/at/all"),
    ],
)
def test_bad_usage_ends_with_2(checks: Callable[..., Ended], arguments: list[str], says: str) -> None:
    code, said, told = checks(*arguments)
    assert (code, said) == (2, {})
    assert says in told


def test_a_directory_for_pages_that_cannot_be_made_is_one_line(checked: Checked, tmp_path: Path) -> None:
    from siltstone.dagster.checks.data_docs import build_data_docs

    (tmp_path / "file").write_text("")
    with pytest.raises(Unreachable, match="cannot make"):
        build_data_docs(checked.subject(), tmp_path / "file" / "pages", [suites.SINK_AGREES])


def test_a_stream_without_state_is_sound(tmp_path: Path) -> None:
    """Its checkpoints hold no table, so nothing builds on another, and a snapshot has nothing to compare."""
    stream = replace(ALONE, sinks={})
    with OpenWarehouse.open_writable(str(tmp_path / "w")) as place:
        run = RegionRun(place, stream, POLICY)
        for n in (1, 2):
            run.step(pa.table({"k": [n], "n": [n]}))
        newest = place.catalog.checkpoints.get_latest(stream.name)
        place.catalog.reference_copies.add(stream.name, newest.epoch, newest.id, [], 0)
    subject = Subject(Settings(warehouse=str(tmp_path / "w")), stream)
    for suite in suites.SUITES:
        outcome = check(subject, suite)
        assert outcome.holds, (suite.name, outcome.summary)
