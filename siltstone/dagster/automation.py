"""Automation conditions of restored state. Turn them on in Dagster's page under Automation."""

import dagster as dg

from siltstone.dagster.names import select_part
from siltstone.pipes.parts import MATERIALIZATION
from siltstone.stream import Stream

CHANGED = dg.AutomationCondition.eager().with_label("when checkpoints changed")
ABSENT = (
    dg.AutomationCondition.missing()
    & ~dg.AutomationCondition.execution_failed()
    & ~dg.AutomationCondition.in_progress()
    & ~dg.AutomationCondition.any_deps_missing()
    & ~dg.AutomationCondition.any_deps_in_progress()
).with_label("when not restored yet")


def restore_condition(stream: Stream) -> dg.AutomationCondition:
    """Make the condition under which Dagster restores partitions, after all blocking checks of the checkpoints passed.

    With daily partitions, the newest is restored whenever checkpoints changed. With hourly partitions, each is restored
    once, because an hour that is over does not change. Materializations do not matter, as they do not change state.
    """
    condition = ABSENT if stream.event_days is None else CHANGED
    materialization = select_part(MATERIALIZATION, stream=stream.name)
    proven = dg.AutomationCondition.all_deps_blocking_checks_passed()
    return (condition & proven).ignore(materialization)
