"""The cap on space amplification with real bytes: what chains take beside what the live state takes as a base."""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pytest

from siltstone.aggregates.operator import Aggregate, Count, Sum
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.background import Background, BackgroundOptions
from siltstone.chains.costs import recorded_chains
from siltstone.chains.due import chain_facts
from siltstone.chains.materialization_rules import MaterializationOptions
from siltstone.chains.policies import POLICIES, PolicyOptions, policy_by_name
from siltstone.format.manifests import read_manifest
from siltstone.model import Form, Kind
from siltstone.operator import Operator, Rows, State, WindowState
from siltstone.stream import Stream
from tests.proofs import in_order
from tests.region_run import RegionRun

CAP = 3.0
KEYS, STEPS = 4000, 22


class Recent(Operator):
    """The values of the last few ticks of every key."""

    name = "recent"
    key = {"key": pa.int64()}  # noqa: RUF012
    inputs = ("tick", "value")
    window = WindowState(value={"tick": pa.int64(), "value": pa.int64()}, order="tick")

    def process(self, rows: Rows, state: State) -> None:
        """Take in, then let go of what is older than a few ticks."""
        order = np.argsort(rows.key_index, kind="stable")
        entries = rows.table.select(["tick", "value"]).take(pa.array(order))
        state.window.insert(rows.keys, rows.key_index[order], entries)
        newest = np.full(len(rows.keys), int(np.max(entries.column("tick").to_numpy())))
        state.window.evict(rows.keys, newest - 3)


UPDATES = Stream(
    "updates",
    source=None,
    operators=[Aggregate("totals", key={"key": pa.int64()}, aggregates=[Count("rows"), Sum("sum", of="value")])],
    max_parallelism=8,
)
WINDOWS = Stream("windows", source=None, operators=[Recent()], max_parallelism=8)


def updates() -> Iterator[pa.Table]:
    """The whole state first, then a quarter of the keys again and again."""
    random = np.random.default_rng(5)
    for step in range(STEPS):
        keys = np.arange(KEYS) if step == 0 else random.choice(KEYS, KEYS // 4, replace=False)
        yield pa.table({"key": keys, "value": random.integers(0, 1 << 40, len(keys))})


def windows() -> Iterator[pa.Table]:
    """A busy time, then ever less, so that the window's contents shrink while all of them change."""
    random = np.random.default_rng(6)
    for tick in range(STEPS):
        rows = max(50, int(KEYS * 0.85**tick))
        keys = np.arange(rows)
        yield pa.table({"key": keys, "tick": np.full(rows, tick), "value": random.integers(0, 1 << 40, rows)})


def chain_bytes(place: OpenWarehouse, stream: str, operator: str, checkpoint: int) -> int:
    """What manifests say the tables' chains take, and their shares of the indexes; of what a materialization stands in
    for, nothing."""
    based = {m.operator: m for m in place.catalog.materializations.list_in_chain(stream, checkpoint)}
    total = based[operator].bytes or 0 if operator in based else 0
    for table, (first, _) in recorded_chains(place.catalog.checkpoints.get(stream, checkpoint), operator).items():
        start = max(first, based[operator].checkpoint + 1) if operator in based else first
        for at in range(start, checkpoint + 1):
            record = place.catalog.checkpoints.get(stream, at)
            handles = read_manifest(place.warehouse.store, record.manifest).handles
            total += sum(h.length for h in handles if (h.operator, h.variable) == (operator, table))
            total += record.statistics["operators"][operator]["tables"][table].get("index_bytes", 0)
    return total


@pytest.mark.slow
@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize(("stream", "rows"), [(UPDATES, updates), (WINDOWS, windows)], ids=["updates", "windows"])
def test_no_chain_takes_more_than_the_cap_allows(place: OpenWarehouse, policy: str, stream: Stream, rows) -> None:
    [operator] = (op.name for op in stream.operators)
    free = PolicyOptions(size_ratio_max=None, d0=60, restore_weight=0.0)  # nothing but the cap ends a chain
    run, found, forms = RegionRun(place, stream, policy_by_name(policy, free)), [], []
    for step in rows():
        completed = run.step(step)
        assert completed is not None
        tables = place.catalog.checkpoints.get(stream.name, completed.id).statistics["operators"][operator]["tables"]
        forms += [of["form"] for of in tables.values() if "form" in of]
        [facts] = chain_facts(place.catalog, stream.name)
        assert facts.chain_bytes == chain_bytes(place, stream.name, operator, completed.id)
        found.append(facts.amplification or 0)
    assert 1.8 < max(found) <= CAP
    assert forms.count(Form.BASE) > 1 and forms.count(Form.DELTA) > STEPS // 2


@pytest.mark.slow
@pytest.mark.parametrize(("stream", "rows"), [(UPDATES, updates), (WINDOWS, windows)], ids=["updates", "windows"])
def test_the_cap_is_of_what_is_live_indeed(place: OpenWarehouse, stream: Stream, rows) -> None:
    """The live state is an estimate; here it is measured, by materializing each checkpoint in a copy of the chain."""
    [operator] = (op.name for op in stream.operators)
    free = PolicyOptions(size_ratio_max=None, d0=60, restore_weight=0.0)
    capped = RegionRun(place, stream, policy_by_name("adjust-d", free))
    whole = RegionRun(
        OpenWarehouse.open_writable(str(place.warehouse.local.root) + "-bases"),
        stream,
        policy_by_name("adjust-d", PolicyOptions(d_max=0)),
    )
    found = []
    for step in rows():
        completed, base = capped.step(step), whole.step(step)
        assert completed is not None and base is not None and completed.digest == base.digest
        manifest = read_manifest(
            whole.region.warehouse.store, whole.region.catalog.checkpoints.get(stream.name, base.id).manifest
        )
        live = sum(h.length for h in manifest.handles if h.kind is Kind.INCREMENTAL)
        found.append(chain_bytes(place, stream.name, operator, completed.id) / live)
    whole.region.catalog.close()
    assert 1.5 < max(found) <= CAP * 1.05


@pytest.mark.slow
def test_the_background_materializes_before_the_policy_has_to_take_a_base(place: OpenWarehouse) -> None:
    free = PolicyOptions(size_ratio_max=None, d0=60, restore_weight=0.0)
    run = RegionRun(place, UPDATES, policy_by_name("adjust-d", free))
    options = BackgroundOptions(MaterializationOptions(interval_s=0), free)
    background = Background(place, "updates", run.region.epoch, options, in_order)
    forms, found = [], []
    for step in updates():
        completed = run.step(step)
        assert completed is not None and background.look()
        forms.append(completed.forms["totals"])
        found.append(chain_facts(place.catalog, "updates")[0].amplification or 0)
    assert forms.count(Form.BASE) == 1
    assert max(found) < 1 + 0.8 * (CAP - 1)
    assert len([m for m in place.catalog.materializations.list("updates") if m.manifest]) > 2
