"""The state of `Aggregate` equals pandas over all rows at once, however they are cut and ordered."""

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from siltstone.aggregates.distinct import ApproxDistinct
from siltstone.aggregates.lists import CollectList, TopN
from siltstone.aggregates.operator import Aggregate, Average, Count, First, Last, Max, Min, Sum
from tests.examples import examples
from tests.subtask import subtask

KEY = {"k": pa.int32(), "kind": pa.string()}
FUNCTIONS = [
    Count("n"),
    Count("n_v", of="v"),
    Sum("total", of="v"),
    Min("lo", of="v"),
    Max("hi", of="v"),
    Average("mean", of="v"),
    First("first", of="s", type=pa.string(), by="t", by_type=pa.int64()),
    Last("last", of="s", type=pa.string(), by="t", by_type=pa.int64()),
    Min("s_lo", of="s", type=pa.string()),
    ApproxDistinct("distinct", of="s", type=pa.string(), precision=16),
    CollectList("all", of="v"),
    CollectList("texts", of="s", type=pa.string(), by="t", by_type=pa.int64(), distinct=True, limit=3),
    TopN("top", 2, by="v", of={"s": pa.string(), "t": pa.int64()}),
    TopN("bottom", 3, by="s", by_type=pa.string(), largest=False),
]
SCHEMA = pa.schema([("k", pa.int32()), ("kind", pa.string()), ("v", pa.int64()), ("s", pa.string()), ("t", pa.int64())])
row = st.tuples(
    st.integers(0, 3),
    st.sampled_from(["", "a"]),
    st.one_of(st.none(), st.integers(-(10**6), 10**6)),
    st.one_of(st.none(), st.text("abé", max_size=2)),
    st.one_of(st.none(), st.integers(0, 4)),
)
batches = st.lists(st.lists(row, min_size=1, max_size=15), min_size=1, max_size=4)


def table_of(rows):
    return pa.table(
        [pa.array(part, f.type) for part, f in zip(zip(*rows, strict=True), SCHEMA, strict=True)],
        schema=SCHEMA,
    )


def plain(value):
    return None if pd.isna(value) else value


def lists_of(part):
    """The lists of a group, by sorting its rows as tuples: (texts, top, bottom)."""
    rows = [tuple(map(plain, row)) for row in part[["v", "s", "t"]].itertuples(index=False)]
    rows = [(v, None if s is None else s.encode(), t) for v, s, t in rows]
    texts = dict.fromkeys(s for _, _, s in sorted((t is None, t or 0, s) for _, s, t in rows if s is not None))
    best = sorted((-v, s is None, s or b"", t is None, t or 0) for v, s, t in rows if v is not None)[:2]
    top = [(-v, None if none else s, None if timeless else t) for v, none, s, timeless, t in best]
    low = sorted(s for _, s, _ in rows if s is not None)
    return (
        [s.decode() for s in list(texts)[:3]],
        [{"v": v, "s": None if s is None else s.decode(), "t": t} for v, s, t in top],
        [{"s": s.decode()} for s in low[:3]],
    )


def by_pandas(rows):
    """(k, kind) -> aggregates."""
    frame = pd.DataFrame(rows, columns=SCHEMA.names).astype({"v": "Int64", "t": "Int64", "s": "object"})
    results = {}
    for key, part in frame.groupby(["k", "kind"]):
        v, s = part["v"], part["s"].dropna()
        timed = part.dropna(subset=["s", "t"])
        timed = timed.assign(encoded=timed["s"].map(lambda text: text.encode())).sort_values(["t", "encoded"])
        first, last = timed["s"].iloc[[0, -1]] if len(timed) else (None, None)
        total = v.sum(min_count=1)
        mean = None if pd.isna(total) else int(total) / int(v.count())
        results[key] = (
            len(part), int(v.count()), plain(total), plain(v.min()), plain(v.max()), mean, first, last,
            min(s, key=lambda text: text.encode()) if len(s) else None,
            s.nunique(), sorted(v.dropna()), *lists_of(part),
        )  # fmt: skip
    return results


def by_key(table):
    return {(row["k"], row["kind"]): tuple(row[f.name] for f in FUNCTIONS) for row in table.to_pylist()}


@pytest.mark.slow
@settings(max_examples=examples(60))
@given(batches, st.booleans())
def test_equals_pandas(cut, map_side):
    operator = Aggregate("a", key=KEY, aggregates=FUNCTIONS, map_side=map_side)
    got = {}
    with subtask(operator, max_parallelism=4) as task:
        for rows in cut:
            table = table_of(rows)
            got.update(by_key(task.process(operator.combine(table) if map_side else table)))
        assert task.state.tables["totals"].rows == len(got)
    assert got == by_pandas([r for rows in cut for r in rows])


@settings(max_examples=examples(40))
@given(batches, st.integers(0, 2**32 - 1))
def test_the_digest_sees_neither_order_nor_batches(cut, seed):
    rows = [r for part in cut for r in part]
    moved = [rows[i] for i in np.random.default_rng(seed).permutation(len(rows))]
    digests = []
    for parts in (cut, [rows], [moved]):
        with subtask(Aggregate("a", key=KEY, aggregates=FUNCTIONS), max_parallelism=4) as task:
            for part in parts:
                task.process(table_of(part))
            digests.append(task.state.tables["totals"].digests.tolist())
    assert digests[0] == digests[1] == digests[2]
