"""The order of the segments that one subtask makes in one step."""

from pathlib import Path
from typing import ClassVar

import numpy as np
import pyarrow as pa

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.policies import PolicyOptions, policy_by_name
from siltstone.changelog.upload_options import UploadOptions
from siltstone.operator import Operator, Rows, State, ValueState
from tests.proofs import failures
from tests.region_run import RegionRun
from tests.sums import NAME, rows, stream_of


class Uneven(Operator):
    """A table with small changes, and after it one with large changes."""

    name = "uneven"
    key: ClassVar = {"k": pa.int64()}
    few = ValueState(value={"n": pa.int64()})
    many = ValueState(value={"noise": pa.binary()})

    def process(self, rows: Rows, state: State) -> None:
        """Change one key of the one, and all of the other."""
        state.few.put(rows.keys.take(np.arange(1)), {"n": np.ones(1, np.int64)})
        noise = np.random.default_rng(rows.table.num_rows)
        state.many.put(rows.keys, {"noise": [noise.bytes(100) for _ in range(len(rows.keys))]})


def test_a_small_segment_sent_before_a_large_one_keeps_its_place(tmp_path: Path) -> None:
    deltas = PolicyOptions(d_max=30, size_ratio_max=None, space_amplification_max=None)
    upload = UploadOptions(inline_bytes=1000, preemptive_persist_bytes=1)
    with OpenWarehouse.open_writable(str(tmp_path)) as place:
        run = RegionRun(place, stream_of(Uneven()), policy_by_name("marginal-cost", deltas), upload=upload)
        for n in range(1, 4):
            run.step(rows(n, changed=60))
        assert not failures(place, NAME)
