"""Laws of variables that do not change, and of opaque values that change for some key groups only.

A stream runs, loses its machine, is rescaled, rolled back and materialized, and old checkpoints are deleted. Whatever
happens, each checkpoint restores to its digests at any parallelism, and what did not change writes nothing.
"""

import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from random import Random
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
from siltstone.errors import LostWorkingState, UsageError
from siltstone.format.manifest import Manifest
from siltstone.format.manifests import read_manifest
from siltstone.model import Form, Kind
from siltstone.operator import OpaqueState, Operator, Rows, State, ValueState
from siltstone.retention.deletion import delete_checkpoints
from siltstone.retention.sweep import sweep
from siltstone.run import persist
from siltstone.run.chains import RunChains
from siltstone.run.task import StepTask
from siltstone.state.hashing import key_groups, xxhash64
from tests.examples import examples
from tests.orphans import PLACES
from tests.outbox_run import roll_back
from tests.places import place_at
from tests.proofs import check_restores, in_order
from tests.region_run import RegionRun
from tests.servers import marked
from tests.sums import NAME, stream_of

Decisions = Mapping[str, Mapping[str, Decision]]
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


class Noise(Operator):
    """Keeps bytes that nothing makes smaller for each key group that it gets rows of."""

    name = "mixed"
    key = pa.schema({"k": pa.int64()})
    notes = OpaqueState(create=bytes, serialize=bytes, deserialize=bytes)

    def process(self, rows: Rows, state: State) -> None:
        """Draw them anew."""
        for group in sorted(set(rows.key_groups.tolist())):
            state.notes[group] = Random(f"{group} {rows.table.column('n')[0]}").randbytes(200)


STREAM = stream_of(Mixed(), max_parallelism=GROUPS)
NOISE = stream_of(Noise(), max_parallelism=64)


def batch(n: int, keys: Sequence[int], names: Sequence[str]) -> pa.Table:
    columns = {"k": pa.array(keys, pa.int64()), "n": pa.array([n] * len(keys), pa.int64())}
    return pa.table({**columns, "what": pa.array([" ".join(names)] * len(keys), pa.string())})


class Watched(RegionRun):
    """A run that notes which variables each step tracks."""

    def attempt(self, task: StepTask, rows: Mapping[int, pa.Table]) -> tuple[pa.Table, Sequence[Acknowledgement]]:
        """One step of one operator."""
        self.tracked.append(sorted(task.tracked))
        return super().attempt(task, rows)

    @cached_property
    def tracked(self) -> list[list[str]]:
        """Of each step."""
        return []


def at_random(draw: Random, decided: Callable[[RunChains], Decisions]) -> Callable[[RunChains], Decisions]:
    """Decisions that change with each step, on everything that has a chain."""

    def decide(chains: RunChains) -> Decisions:
        made = {op: dict(of) for op, of in decided(chains).items()}
        for operator, states in chains.policies.items():
            for name in (name for name, state in states.items() if state.checkpoints):
                form = draw.choice([Form.BASE, Form.DELTA])
                tracking, limit = form is Form.DELTA, draw.choice([None, 0, 100]) if form is Form.DELTA else None
                made[operator][name] = Decision(
                    form=form, tracking=tracking, d=draw.choice([0, 3]), reason="", delta_limit_bytes=limit
                )
        return made

    return decide


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
        steps, policy = data.draw(st.integers(1, 3)), data.draw(st.sampled_from(POLICIES))
        backends = data.draw(st.sampled_from([["heap"], ["heap", "rocksdb"]]))
        if data.draw(st.booleans()):
            decided = RunChains.decisions.fget
            assert decided is not None
            chaos = at_random(Random(data.draw(st.integers(0, 2**32))), decided)
            stack.enter_context(patch.object(RunChains, "decisions", property(chaos)))
        run, n = RegionRun(place, STREAM, policy, parallelism=2, checkpoint_steps=steps), 1
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
                        interval = set()
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
            run = RegionRun(
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
def test_large_values_that_were_replaced_go_with_the_checkpoint_that_wrote_them(
    tmp_path: Path, kind: str, orders: dict[str, Decision]
) -> None:
    with PLACES[kind](tmp_path) as place, patch.object(persist, "OPAQUE_BYTES", 100):
        run = RegionRun(place, STREAM, POLICY)
        run.step(batch(1, range(20), VARIABLES))
        run.step(batch(2, [1], ["notes"]))
        first, second = ({h.object for h in newest_manifest(place, c).handles if h.variable == "notes"} for c in (1, 2))
        assert all(name.endswith(".opaque") for name in first | second)
        orders.update(notes=ordered(Form.BASE))
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


def bytes_of(place: OpenWarehouse, name: str, checkpoints: Sequence[int]) -> list[tuple[int, bool]]:
    """Per checkpoint how many bytes of a variable it wrote, and whether all of it."""
    handles = [[h for h in newest_manifest(place, c).handles if h.variable == name] for c in checkpoints]
    return [(sum(h.length for h in of), all(h.form is Form.BASE for h in of)) for of in handles]


@pytest.mark.parametrize("policy", ["marginal-cost", "adjust-d"])
def test_opaque_values_that_change_all_at_once_keep_no_older_ones(tmp_path: Path, policy: str) -> None:
    """US 9471438 keeps the newest version of a non-incremental variable, and deletes older ones at once."""
    with place_at(tmp_path / "w") as place, patch.object(persist, "OPAQUE_BYTES", 100):
        run = RegionRun(place, NOISE, policy_by_name(policy), parallelism=2)
        for n in range(1, 13):
            run.step(batch(n, range(500), []))
        written = bytes_of(place, "notes", range(1, 13))
        assert sum(not whole for _, whole in written) <= 2, "a delta is tried, and does not pay"
        newest = max(c for c, (_, whole) in enumerate(written, 1) if whole)
        delete_checkpoints(place, NAME, list(range(1, 12)))
        kept = sum(size for name, size in place.warehouse.store.list("") if name.endswith(".opaque"))
        assert kept == sum(size for size, _ in written[newest - 1 :])
        check(place)


def test_opaque_values_of_few_key_groups_are_written_alone_until_a_restore_reads_too_much(tmp_path: Path) -> None:
    with place_at(tmp_path / "w") as place:
        run = RegionRun(place, NOISE, policy_by_name("marginal-cost"), parallelism=2)
        run.step(batch(1, range(500), []))
        for n in range(2, 40):
            run.step(batch(n, range(n, n + 4), []))
        written = bytes_of(place, "notes", range(1, 40))
        bases = [size for size, whole in written if whole]
        small = [size for size, _ in written if size < 0.1 * bases[0]]
        assert 2 <= len(bases) <= 8 and len(small) > 0.8 * len(written)
        state = run.region.chains.policies["mixed"]["notes"]
        assert state.deltas_bytes <= 2.0 * state.base_bytes
        check(place)


@pytest.mark.parametrize("parallelism", [1, 8])
def test_the_bounds_hold_for_opaque_values_that_one_subtask_has(tmp_path: Path, parallelism: int) -> None:
    keys = pa.array(range(4000), pa.int64())
    groups = key_groups(xxhash64([keys]), 64).tolist()
    own = [groups.index(group) for group in range(8)]
    with place_at(tmp_path / "w") as place:
        run = RegionRun(place, NOISE, policy_by_name("marginal-cost"), parallelism=parallelism)
        for n in range(1, 40):
            run.step(batch(n, own if n <= 12 else own[n % 2 : n % 2 + 2], []))
            chain = run.region.chains.policies["mixed"]["notes"]
            handles = [h for c in range(1, n + 1) for h in newest_manifest(place, c).handles if h.variable == "notes"]
            newest = max(i for i, h in enumerate(handles) if h.form is Form.BASE and 0 in h.key_groups)
            base = handles[newest].length
            deltas = sum(h.length for h in handles[newest + 1 :] if h.form is Form.DELTA)
            assert base <= chain.base_bytes <= 1.1 * base + 500 and chain.deltas_bytes == deltas <= 2.0 * base
        check(place)


@pytest.mark.parametrize("when", [0, 1])
@pytest.mark.parametrize("backend", ["heap", "rocksdb"])
def test_a_subtask_that_did_not_change_writes_nothing_whatever_others_did(
    tmp_path: Path, backend: str, when: int
) -> None:
    policy = policy_by_name("marginal-cost", PolicyOptions(d_max=0))
    with place_at(tmp_path / "w") as place:
        run = RegionRun(place, STREAM, policy, parallelism=2, checkpoint_steps=2, backend=backend)
        for n in (1, 2):
            run.step(batch(n, range(50), VARIABLES if n == 1 else []))
        for at in (0, 1):
            run.step(batch(3, [1], ["busy", "notes"] if at == when else []))
        written = {(h.variable, h.key_groups) for h in newest_manifest(place, 2).handles if h.kind is not Kind.INDEX}
        assert {name for name, _ in written} == {"busy", "notes"} and len(written) == 2
        check(place)


def test_checkpoints_as_files_store_none_of_an_operator_without_tables(tmp_path: Path) -> None:
    with place_at(tmp_path / "w") as place:
        run = RegionRun(place, NOISE, policy_by_name("files"), parallelism=2, backend="rocksdb")
        for n in (1, 2, 3):
            run.step(batch(n, range(50) if n < 3 else [], []))
        assert not [name for name in place.warehouse.store.list("") if ".files" in name[0] or ".sst" in name[0]]
        assert [bool(size) for size, _ in bytes_of(place, "notes", [1, 2, 3])] == [True, True, False]
        check(place)


@pytest.mark.parametrize("backend", ["heap", "rocksdb"])
def test_a_variable_that_always_takes_bases_tracks_nothing(
    tmp_path: Path, orders: dict[str, Decision], backend: str
) -> None:
    """US 9471438 switches tracking per data structure."""
    with place_at(tmp_path / "w") as place:
        RegionRun(place, STREAM, POLICY, backend=backend).step(batch(1, range(30), VARIABLES))
        never = Decision(form=Form.BASE, tracking=False, d=0, reason="a test")
        orders.update(busy=never, notes=never, idle=ordered(Form.DELTA), other=ordered(Form.DELTA))
        run = Watched(place, STREAM, POLICY, checkpoint_steps=3, backend=backend)
        for n in range(2, 8):
            run.step(batch(n, range(n, n + 5), VARIABLES if n % 3 else ["idle"]))
        assert run.tracked == [["idle", "other"]] * 6
        assert [[whole for _, whole in bytes_of(place, name, [2, 3])] for name in VARIABLES] == [
            [True, True],
            [False, False],
            [True, True],
            [False, False],
        ]
        states = Path(place.warehouse.local.root).rglob("state")
        check(place)
        shutil.rmtree(next(states))
        with pytest.raises(LostWorkingState, match="were not logged"):
            for n in range(8, 10):
                run.step(batch(n, range(5), VARIABLES))
                shutil.rmtree(next(Path(place.warehouse.local.root).rglob("state")))


def test_a_step_that_changes_only_what_it_tracks_is_logged(tmp_path: Path, orders: dict[str, Decision]) -> None:
    """So that lost state is rolled forward, although other variables of its operator are not tracked."""
    with place_at(tmp_path / "w") as place:
        RegionRun(place, STREAM, POLICY).step(batch(1, range(30), VARIABLES))
        orders.update(busy=Decision(form=Form.BASE, tracking=False, d=0, reason="a test"), idle=ordered(Form.DELTA))
        run = RegionRun(place, STREAM, POLICY, checkpoint_steps=4)
        for n in range(2, 5):
            run.step(batch(n, range(n, n + 5), ["idle"]))
            shutil.rmtree(next(Path(place.warehouse.local.root).rglob("state")))
        run.step(batch(5, [1], ["idle"]))
        assert {h.variable for h in newest_manifest(place, 2).handles if h.kind is Kind.INCREMENTAL} == {"idle"}
        check(place)


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
