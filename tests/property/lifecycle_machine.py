"""The whole life cycle in memory, in any order: real catalog, region, materialization, deletion, sweep, leases, forks
and recovery, against an oracle of the input log (`tests.simulation`).

    python -m tests.property.lifecycle_machine --schedules 5000 --seed 1
"""

import argparse
import logging
import time
from collections import Counter

import pyarrow as pa
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from tests.simulation.world import World

ACTIONS = (
    *("run", "run", "run", "materialize", "materialize", "truncate", "delete", "sweep", "sweep", "read", "snapshot"),
    *("savepoint", "fork", "recover", "rewind", "damage", "go", "go", "go", "go", "go", "go", "go", "go"),
    *("finish", "finish", "finish", "kill", "fail", "clock", "lose", "fail over"),
)
STOPS = (1, 2, 3, 5, 8, 13, 30, 60, 200)
Schedule = list[tuple[str, int, int]]
SCHEDULES = st.lists(
    st.tuples(st.sampled_from(ACTIONS), st.integers(0, 999), st.sampled_from(STOPS)), min_size=25, max_size=35
)
"""an action, what it chooses by, and how many stops the process it starts or wakes goes past"""


def perform(schedule: Schedule, finish: bool) -> Counter[str]:
    """One schedule from beginning to end, after a few checkpoints; what happened in it, counted.

    Args:
        finish: whether processes that are left in the end go on to their ends, or are killed.

    Raises:
        AssertionError: a promise was broken.
    """
    world = World()
    try:
        for action, a, b in [("run", 5, 60), *schedule]:
            world.act(action, a, b)
        world.end(finish)
    finally:
        world.close()
    return world.counts


def main() -> None:
    """Very many schedules; stops at the first that breaks a promise, made as short as can be."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--schedules", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    pa.set_cpu_count(1)
    total: Counter[str] = Counter()
    start = time.perf_counter()
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large]

    @seed(arguments.seed)
    @settings(max_examples=arguments.schedules, database=None, deadline=None, suppress_health_check=slow)
    @given(SCHEDULES, st.booleans())
    def run(schedule: Schedule, finish: bool) -> None:
        total.update(perform(schedule, finish))
        total["schedules"] += 1
        if total["schedules"] % 100 == 0:
            print(f"{total['schedules']} schedules, {time.perf_counter() - start:.0f} s", flush=True)

    run()
    print(f"{total['schedules']} schedules of seed {arguments.seed}, no violation, {time.perf_counter() - start:.0f} s")
    for what, count in sorted(total.items()):
        print(f"  {what}: {count}")


if __name__ == "__main__":
    main()
