"""What a TTL costs where nothing expires: a step of an operator with one, beside a step of the same without.

Without Spark, as `benchmarks.timers`: each step updates the counts of K random keys of S, and ends in a checkpoint. The
sides take turns, over the same keys, in steps of a second, so all write the same stamp: that changes every eleven
hours, and each key that is then updated gets a further entry in the time index. Bytes are those of a step's checkpoint.
"""

from contextlib import ExitStack
from pathlib import Path
from statistics import median

import numpy as np
import pyarrow as pa

from benchmarks.goals import Goal, Report, table_of
from benchmarks.rounds import in_turn
from benchmarks.timers import BACKENDS, STATE_ROWS, STEP_ROWS, TURNS, WARM_UP, Side, Touches
from benchmarks.workload import short
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.operator import ValueState
from siltstone.state.ttl import TTL

PLAIN, KEPT = "without", "with a TTL"
TIME_AT_MOST, BYTES_AT_MOST = 1.15, 1.25


class Expires(Touches):
    """Counts the rows of each key, which is forgotten after 30 days without one."""

    name = "expires"
    counts = ValueState({"rows": pa.int64()}, ttl=TTL("30 days", clock="processing"))


def run(scratch: Path, *, quick: bool = False) -> Report:
    """Measure both backends."""
    state, rows, turns = (STATE_ROWS // 10, STEP_ROWS // 10, 4) if quick else (STATE_ROWS, STEP_ROWS, 2 * TURNS)
    title = f"TTL: a step of {short(rows)} keys of {short(state)}, of which none expires"
    report = Report([table := table_of(title, "backend", "side", "s", "delta MB", left=2)])
    for backend in BACKENDS:
        found = measure(scratch / backend, backend, state, rows, turns)
        for side, (seconds, sizes) in found.items():
            table.add_row(backend, side, f"{median(seconds):.3f}", f"{median(sizes) / 1e6:.3f}")
        for what, of, at_most in (("time", 0, TIME_AT_MOST), ("delta bytes", 1, BYTES_AT_MOST)):
            ratios = [one / other for one, other in zip(found[KEPT][of], found[PLAIN][of], strict=True)]
            report.goals.append(Goal.of_rounds(f"TTL, {what} of a step, {backend}", ratios, at_most=at_most))
        report.numbers[backend] = {side: {"s": s, "bytes": sizes} for side, (s, sizes) in found.items()}
    return report


def measure(
    scratch: Path, backend: str, state_rows: int, step_rows: int, turns: int
) -> dict[str, tuple[list[float], list[int]]]:
    """Return the seconds and the bytes of each side's steps; a turn in which a side writes a base is not counted."""
    scratch.mkdir()
    draw, found = np.random.default_rng(1), {name: (list[float](), list[int]()) for name in (PLAIN, KEPT)}
    with ExitStack() as stack:
        sides, turn = dict[str, Side](), 0
        for name, operator in ((PLAIN, Touches()), (KEPT, Expires())):
            place = stack.enter_context(OpenWarehouse.open_writable(str(scratch / operator.name)))
            sides[name] = Side(place, operator, backend)
            sides[name].step(np.arange(state_rows))
        while len(found[PLAIN][0]) < turns:
            keys, took = draw.choice(state_rows, step_rows, replace=False), dict[str, float]()
            for name, side in in_turn(sides.items(), turn):
                side.now_us += 1_000_000
                took[name] = side.step(keys)
            turn += 1
            if turn <= WARM_UP or any("base" in side.seconds for side in sides.values()):
                continue
            for name, side in sides.items():
                newest = side.place.catalog.checkpoints.list(side.stream.name)[-1]
                assert newest.rows == state_rows, "nothing expires"
                found[name][0].append(took[name])
                found[name][1].append(newest.bytes)
    return found
