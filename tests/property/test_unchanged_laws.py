"""Laws of variables that do not change, and of opaque values that change for some key groups only.

A stream runs, loses its machine, is rescaled, rolled back and materialized, and old checkpoints are deleted. Whatever
happens, each checkpoint restores to its digests at any parallelism, and what did not change writes nothing.
"""

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import pyarrow as pa
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.chain_rules import is_base_only
from siltstone.chains.materialize import materialize
from siltstone.chains.policies import PolicyOptions, policy_by_name
from siltstone.chains.policy_rules import Decision
from siltstone.changelog.acknowledgement import Acknowledgement
from siltstone.errors import UsageError
from siltstone.format.manifest import Manifest
from siltstone.format.manifests import read_manifest
from siltstone.model import Form, Kind
from siltstone.operator import OpaqueState, Operator, Rows, State, ValueState
from siltstone.retention.deletion import delete_checkpoints
from siltstone.retention.sweep import sweep
from siltstone.run import changed, persist
from siltstone.run.chains import RunChains
from siltstone.run.task import StepTask
from tests.examples import examples
from tests.orphans import PLACES
from tests.outbox_run import roll_back
from tests.places import place_at
from tests.proofs import check_restores, in_order
from tests.region_run import RegionRun
from tests.servers import marked
from tests.sums import NAME, stream_of

GROUPS = 8
VARIABLES = ("busy", "idle", "notes", "other")
POLICY = policy_by_name("marginal-cost", PolicyOptions(d_max=6, size_ratio_max=None))
POLICIES = [
    POLICY,
    policy_by_name("marginal-cost", PolicyOptions(d_max=0)),
    policy_by_name("adjust-d", PolicyOptions(d0=0, probe_after=2, size_ratio_max=None)),
    policy_by_name("adjust-d", PolicyOptions(d0=2, d_max=2, size_ratio_max=None)),
]


class Texts(OpaqueState[str]):
    """A text per key group."""


class Mixed(Operator):
    """Each micro-batch says which variables it changes for its keys."""

    name = "mixed"
    key = {"k": pa.int64()}  # noqa: RUF012
    busy = ValueState(value={"n": pa.int64()})
    idle = ValueState(value={"n": pa.int64()})
    notes = Texts(create=str, serialize=str.encode, deserialize=bytes.decode)
    other = Texts(create=str, serialize=str.encode, deserialize=bytes.decode)

    def process(self, rows: Rows, state: State) -> None:
        """Set the number in the tables, and the texts of the rows' key groups."""
        if not len(rows):
            return
        n, names = rows.table.column("n")[0].as_py(), rows.table.column("what")[0].as_py().split()
        for name in {"busy", "idle"}.intersection(names):
            getattr(state, name).put(rows.keys, {"n": pa.array([n] * len(rows.keys), pa.int64())})
        for group in set(rows.key_groups.tolist()):
            if "notes" in names:
                state.notes[group] = f"{n} " * 60
            if "other" in names:
                state.other[group] = str(n)


STREAM = stream_of(Mixed(), max_parallelism=GROUPS)


def batch(n: int, keys: Sequence[int], names: Sequence[str]) -> pa.Table:
    columns = {"k": pa.array(keys, pa.int64()), "n": pa.array([n] * len(keys), pa.int64())}
    return pa.table({**columns, "what": pa.array([" ".join(names)] * len(keys), pa.string())})


class Watched(RegionRun):
    """A run that notes whether a step before the checkpoint was not tracked."""

    untracked = False

    def attempt(self, task: StepTask, rows: Mapping[int, pa.Table]) -> tuple[pa.Table, Sequence[Acknowledgement]]:
        """One step of one operator."""
        self.untracked |= task.checkpoint is None and not task.tracking
        return super().attempt(task, rows)


def newest_manifest(place: OpenWarehouse, checkpoint: int) -> Manifest:
    return read_manifest(place.warehouse.store, place.catalog.checkpoints.get(NAME, checkpoint).manifest)


def check(place: OpenWarehouse) -> None:
    """Every checkpoint proves, and some restore, at any parallelism."""
    check_restores(place, NAME, (3, 1))


@settings(phases=[Phase.explicit, Phase.generate], max_examples=examples(20))
@given(st.data())
def test_whatever_happens_each_checkpoint_restores_and_nothing_unneeded_is_written(data) -> None:
    keys, names = st.lists(st.integers(0, 30), min_size=1, max_size=8), st.sets(st.sampled_from(VARIABLES))
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        place = stack.enter_context(place_at(Path(directory) / "w"))
        stack.enter_context(patch.object(persist, "OPAQUE_BYTES", data.draw(st.sampled_from([100, 64 << 10]))))
        stack.enter_context(patch.object(persist, "DELTA_ROWS", data.draw(st.sampled_from([4, 1 << 15]))))
        stack.enter_context(patch.object(changed, "CHAIN_MANIFESTS", data.draw(st.sampled_from([1, 3, 16]))))
        steps, policy = data.draw(st.integers(1, 3)), data.draw(st.sampled_from(POLICIES))
        backends = data.draw(st.sampled_from([["heap"], ["heap", "rocksdb"]]))
        run, n = Watched(place, STREAM, policy, parallelism=2, checkpoint_steps=steps), 1
        run.step(batch(n, range(20), VARIABLES), ends=True)
        interval: set[str] = set()
        for _ in range(data.draw(st.integers(4, 14))):
            n += 1
            match data.draw(st.sampled_from(["step"] * 8 + ["again", "lost", "materialize", "delete", "roll back"])):
                case "step":
                    what = sorted(data.draw(names))
                    interval |= set(what)
                    states = run.region.chains.policies["mixed"]
                    whole = {table for table, state in states.items() if is_base_only(state)}
                    completed = run.step(batch(n, data.draw(keys), what))
                    if completed:
                        manifest = newest_manifest(place, completed.id)
                        written = {h.variable for h in manifest.handles if h.kind is not Kind.INDEX}
                        based = {h.variable for h in manifest.handles if h.form is Form.BASE}
                        assert written - interval <= based, "only a base may hold what did not change"
                        assert not (written - interval) & whole, "a base is not written again as it is"
                        if not run.untracked:
                            assert written - interval <= {"busy", "idle"}, "what did not change writes nothing"
                        interval, run.untracked = set(), False
                    continue
                case "materialize":
                    at = data.draw(st.sampled_from([c.id for c in place.catalog.checkpoints.list(NAME)]))
                    materialize(place, NAME, "mixed", at, id=f"m{n}", parallelism=2, run=in_order)
                    continue
                case "delete":
                    older = [c.id for c in place.catalog.checkpoints.list(NAME)][:-1]
                    delete_checkpoints(place, NAME, older[: data.draw(st.integers(0, len(older)))])
                    continue
                case "lost":
                    shutil.rmtree(place.warehouse.local.root / "work", ignore_errors=True)
                case "roll back":
                    at = data.draw(st.sampled_from([c.id for c in place.catalog.checkpoints.list(NAME)]))
                    roll_back(place, at, NAME)
            interval = set()
            parallelism = data.draw(st.integers(1, 4))
            run = Watched(
                place,
                STREAM,
                policy,
                parallelism=parallelism,
                checkpoint_steps=steps,
                backend=data.draw(st.sampled_from(backends)),
            )
        check(place)
        sweep(place, NAME)
        check(place)


@pytest.mark.parametrize("opaque", [0, 2])
@pytest.mark.parametrize("groups", [8, 128, 1024])
def test_a_rescale_writes_less_than_two_kilobytes(tmp_path: Path, groups: int, opaque: int) -> None:
    """Of eleven empty tables; the extract and the mark of the epoch are the run's, whatever it writes."""
    tables = {f"v{i}": ValueState(value={"n": pa.int64()}) for i in range(11)}
    texts = {f"o{i}": Texts(create=str, serialize=str.encode, deserialize=bytes.decode) for i in range(opaque)}
    own = {"name": "mixed", "key": Mixed.key, "process": lambda *_: None}
    stream = stream_of(type("Eleven", (Operator,), {**own, **tables, **texts})(), max_parallelism=groups)
    with place_at(tmp_path / "w") as place:
        RegionRun(place, stream, POLICY, parallelism=2).step(batch(1, range(20), VARIABLES))
        run = RegionRun(place, stream, POLICY, parallelism=3)
        before = dict(place.warehouse.store.list(""))
        run.step_without_rows()
        written = {name: size for name, size in place.warehouse.store.list("") if before.get(name) != size}
        assert sum(written.values()) < 2000
        assert not newest_manifest(place, 2).handles
        check(place)


@pytest.mark.parametrize("parallelism", [2, 3])
def test_a_rescale_writes_a_manifest_alone(tmp_path: Path, parallelism: int) -> None:
    with place_at(tmp_path / "w") as place:
        RegionRun(place, STREAM, POLICY, parallelism=2).step(batch(1, range(20), VARIABLES))
        completed = RegionRun(place, STREAM, POLICY, parallelism=parallelism).step_without_rows()
        manifest = newest_manifest(place, completed.id)
        assert not manifest.handles and not manifest.objects
        assert completed.forms == {"mixed": Form.DELTA}
        check(place)


@pytest.mark.parametrize("kind", marked(PLACES))
def test_large_values_that_were_replaced_go_with_the_checkpoint_that_wrote_them(tmp_path: Path, kind: str) -> None:
    with PLACES[kind](tmp_path) as place, patch.object(persist, "OPAQUE_BYTES", 100):
        run = RegionRun(place, STREAM, POLICY)
        run.step(batch(1, range(20), VARIABLES))
        run.step(batch(2, [1], ["notes"]))
        first, second = ({h.object for h in newest_manifest(place, c).handles if h.variable == "notes"} for c in (1, 2))
        assert all(name.endswith(".opaque") for name in first | second)
        with patch.object(changed, "CHAIN_MANIFESTS", 1):
            run.step(batch(3, [1], ["notes"]))
        delete_checkpoints(place, NAME, [1, 2])
        kept = set(place.warehouse.store.list(""))
        assert not kept & (first | second), "the values that were replaced are deleted at once"
        check(place)


@pytest.fixture
def orders(monkeypatch: pytest.MonkeyPatch) -> dict[str, Decision]:
    """Table -> what is decided on it in place of the policy's decision."""
    given: dict[str, Decision] = {}
    decided = RunChains.decisions.fget
    assert decided is not None

    def as_given(chains: RunChains) -> Mapping[str, Mapping[str, Decision]]:
        return {operator: {**of, **given} for operator, of in decided(chains).items()}

    monkeypatch.setattr(RunChains, "decisions", property(as_given))
    return given


def ordered(form: Form, limit_bytes: int | None = None) -> Decision:
    return Decision(form=form, tracking=True, d=3, reason="a test", delta_limit_bytes=limit_bytes)


@pytest.mark.parametrize("last", ["busy", "idle"])
def test_a_delta_that_earlier_steps_made_too_large_is_a_base(
    tmp_path: Path, orders: dict[str, Decision], last: str
) -> None:
    with place_at(tmp_path / "w") as place:
        RegionRun(place, STREAM, POLICY).step(batch(1, range(3000), VARIABLES))
        orders.update(busy=ordered(Form.DELTA, 100), idle=ordered(Form.DELTA, 10_000))
        run = RegionRun(place, STREAM, POLICY, checkpoint_steps=2)
        run.step(batch(2, range(2000), ["busy"]))
        run.step(batch(3, [1], [last]))
        handles = [h for h in newest_manifest(place, 2).handles if h.kind is Kind.INCREMENTAL]
        assert {h.form for h in handles if h.variable == "busy"} == {Form.BASE}
        assert all(h.form is Form.DELTA for h in handles if h.variable == "idle")
        check(place)


@pytest.mark.parametrize("rows_a_segment", [8, 1 << 15])
def test_steps_whose_segments_are_cut_at_other_key_groups_prove(
    tmp_path: Path, orders: dict[str, Decision], monkeypatch: pytest.MonkeyPatch, rows_a_segment: int
) -> None:
    """In the first step where `idle` builds on other versions, or there are many changes; in the second nowhere."""
    with place_at(tmp_path / "w") as place:
        RegionRun(place, STREAM, POLICY, parallelism=2).step(batch(1, range(30), VARIABLES))
        orders.update(busy=ordered(Form.BASE), idle=ordered(Form.DELTA))
        RegionRun(place, STREAM, POLICY, parallelism=2).step(batch(2, [1], ["idle"]))
        run = RegionRun(place, STREAM, POLICY, checkpoint_steps=2)
        with monkeypatch.context() as patched:
            patched.setattr(persist, "DELTA_ROWS", rows_a_segment)
            run.step(batch(3, range(30), ["busy", "idle"]))
        run.step(batch(4, [1, 2], ["busy"]))
        check(place)


def test_a_second_materialization_holds_the_opaque_values_of_the_first(tmp_path: Path) -> None:
    with place_at(tmp_path / "w") as place:
        run = RegionRun(place, STREAM, POLICY, parallelism=2)
        run.step(batch(1, range(20), VARIABLES))
        for n in range(2, 5):
            run.step(batch(n, range(n, n + 3), ["busy", "notes"]))
        for id in ("first", "second"):
            materialize(place, NAME, "mixed", 4, id=id, parallelism=2, run=in_order)
            check(place)
        delete_checkpoints(place, NAME, [1, 2, 3])
        run.step(batch(5, [1], ["notes"]))
        sweep(place, NAME)
        check(place)


def test_what_is_whole_already_is_not_materialized(tmp_path: Path) -> None:
    class Notes(Mixed):
        """Has no table."""

        busy = idle = None  # type: ignore[assignment]

    with place_at(tmp_path / "w") as place:
        RegionRun(place, stream_of(Notes()), POLICY).step(batch(1, range(20), ["notes"]))
        with pytest.raises(UsageError, match="checkpoint 1 of sums holds all of operator mixed whole already"):
            materialize(place, NAME, "mixed", 1, id="m", parallelism=1, run=in_order)
