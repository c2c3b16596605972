"""Compare rolling working state forward with restoring it: the same state, from the same changelog.

Working state of S keys stands at version v, and the stream has gone on to v + 10 by steps of K keys. A task of the next
step opens it at v + 10: it rolls it forward if its directory is there, ten steps behind, and restores it whole if there
is no directory. Four cases: the same K keys change in every step, or others each time; the ten steps are logged after
the newest checkpoint, or each of them ended in a checkpoint. In the first of these a restore ends by rolling forward,
too, from the checkpoint. Where each step changes other keys, a third of the state has to be written anew either way:
the goal is for the same keys.

The state is opened as a step opens it (`run.working_state`), subtask by subtask in one process, without Spark. The
two ways take turns, and the ratio is taken within each turn. The digests of both have to be equal. The store is a
directory on this machine. Between machines, what is read travels, and a restore reads more.
"""

import os
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.goals import Goal, Report, table_of
from benchmarks.rounds import in_turn
from benchmarks.states import OPERATOR, SUBTASKS, always_deltas, rows_for, stream
from benchmarks.workload import short
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.policies import policy_by_name
from siltstone.restore.restore import digests_of
from siltstone.run.phase_timer import PhaseTimer
from siltstone.run.task import StepTask, identity
from siltstone.run.working_state import working_state
from siltstone.state.backends.heap.mapped_array import forget_removed_files
from tests.region_run import RegionRun

AT_MOST = 0.1
STEPS = 10
FORWARD, RESTORE = "rolled forward", "restored"
SAME, OTHER = "the same keys each step", "other keys each step"
LOGGED, CHECKPOINTS = "logged", "in checkpoints"

Turns = Sequence[Mapping[str, float]]
"""per turn, way -> seconds of all subtasks together"""


def run(scratch: Path, *, quick: bool = False) -> Report:
    """Measure each case."""
    rows, changed, turns = (30_000, 1_000, 2) if quick else (3_000_000, 100_000, 7)
    found: dict[str, Turns] = {}
    for keys in (SAME, OTHER):
        for steps in (LOGGED, CHECKPOINTS):
            directory = scratch / f"{keys}-{steps}".replace(" ", "-")
            found[f"{keys}, {steps}"] = measure(
                directory, rows, changed, turns, same=keys == SAME, logged=steps == LOGGED
            )
            shutil.rmtree(directory)
    return report_of(found, f"{short(rows)}, {STEPS} steps of {short(changed)}")


def measure(scratch: Path, rows: int, changed: int, turns: int, *, same: bool, logged: bool) -> Turns:
    """Load a state, run the steps, and open the state both ways in turns.

    Args:
        rows: keys of the state.
        changed: keys of a step; ten times as many have to be in the state.
        same: whether all steps change the same keys.
        logged: whether the steps come after the newest checkpoint, instead of each ending in one.
    """
    scratch.mkdir(exist_ok=True)
    draw, found = np.random.default_rng(1), []
    with OpenWarehouse.open_writable(str(scratch / "warehouse")) as place:
        steps = RegionRun(
            place,
            stream(),
            policy_by_name("adjust-d", always_deltas()),
            SUBTASKS,
            checkpoint_steps=2 * STEPS if logged else 1,
        )
        everything = draw.permutation(rows)
        assert steps.step(rows_for(everything, draw), ends=True) is not None
        state = place.warehouse.local.state(stream().name, steps.region.epoch, OPERATOR, 0).parent
        shutil.copytree(state, scratch / "behind")
        for number in range(STEPS):
            first = 0 if same else number * changed
            steps.step(rows_for(draw.permutation(everything[first : first + changed]), draw))
        task = steps.region.begin_step()[OPERATOR]
        for turn in range(turns + 1):
            # Which of them goes first alternates. The first turn does not count.
            ways = in_turn(sorted((FORWARD, RESTORE)), turn)
            seconds = {way: open_state(task, state, scratch / "behind" if way == FORWARD else None) for way in ways}
            if turn:
                found.append(seconds)
    return found


def open_state(task: StepTask, directory: Path, behind: Path | None) -> float:
    """Open the state of every subtask at the task's base version; return the seconds.

    Args:
        directory: of the operator's working state; replaced.
        behind: a copy of it at an older version; None for no working state.

    Raises:
        RuntimeError: it was not opened in the way that was meant, or came to another state.
    """
    shutil.rmtree(directory)
    if behind is not None:
        shutil.copytree(behind, directory)
    forget_removed_files()
    os.sync()
    seconds = 0.0
    for subtask in range(task.parallelism):
        clock, began = PhaseTimer(), time.perf_counter()
        with working_state(task, subtask, clock) as state:
            seconds += time.perf_counter() - began
            if identity(OPERATOR, digests_of(state)) != task.base[subtask]:
                raise RuntimeError("the state is not the one that the steps made")
        if ("restore" in clock.seconds) != (behind is None):
            raise RuntimeError(f"subtask {subtask} was opened by {', '.join(clock.seconds) or 'nothing'}")
    return seconds


def report_of(found: Mapping[str, Turns], name: str) -> Report:
    """Make the report: medians, ranges, and the median of the turns' ratios as the goal."""
    title = f"working state of {name} behind (load {os.getloadavg()[0]:.1f} at the end)"
    heads = ("case", f"{FORWARD}, s", "min to max", f"{RESTORE}, s", "min to max", "ratio", "min to max")
    report = Report([table := table_of(title, *heads)], numbers={"turns": dict(found)})
    for case, turns in found.items():
        ways = [[turn[way] for turn in turns] for way in (FORWARD, RESTORE)]
        ratios = [turn[FORWARD] / turn[RESTORE] for turn in turns]
        columns = [cell for each in (*ways, ratios) for cell in (f"{median(each):.3f}", _range(each))]
        table.add_row(case, *columns)
        what = f"roll forward / restore, {name}, {case}"
        report.goals.append(Goal.of_rounds(what, ratios, at_most=AT_MOST if case.startswith(SAME) else None))
    return report


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.3f} to {max(values):.3f}"
