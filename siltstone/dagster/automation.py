"""What happens by itself when something upstream changed; turn it on in the page under Automation."""

import dagster as dg

from siltstone.dagster.names import MATERIALIZATION, asset_key
from siltstone.stream import Stream

CHANGED = dg.AutomationCondition.eager().with_label("when checkpoints changed")
ABSENT = (
    dg.AutomationCondition.missing()
    & ~dg.AutomationCondition.execution_failed()
    & ~dg.AutomationCondition.in_progress()
    & ~dg.AutomationCondition.any_deps_missing()
    & ~dg.AutomationCondition.any_deps_in_progress()
).with_label("where nothing was restored")


def restore_condition(stream: Stream) -> dg.AutomationCondition:
    """When restored state is made, once all blocking checks of the checkpoints passed.

    Of days, the newest, whenever checkpoints changed. Of hours, each one once: those before it show what they showed.
    Whether anything was materialized changes nothing that is restored.
    """
    condition = ABSENT if stream.event_days is None else CHANGED
    materialization = dg.AssetSelection.assets(asset_key(stream.name, MATERIALIZATION))
    proven = dg.AutomationCondition.all_deps_blocking_checks_passed()
    return (condition & proven).ignore(materialization)
