"""What happens by itself when something upstream changed; turn it on in the page under Automation."""

import dagster as dg

from assets.names import MATERIALIZATION, asset_key


def restore_condition(stream: str) -> dg.AutomationCondition:
    """When restored state is made: its newest partition, or those that are new, once checkpoints changed and all
    blocking checks of them passed. Whether anything was materialized changes nothing that is restored.
    """
    condition = dg.AutomationCondition.eager() & dg.AutomationCondition.all_deps_blocking_checks_passed()
    materialization = dg.AssetSelection.assets(asset_key(stream, MATERIALIZATION))
    return condition.ignore(materialization).with_label("when checkpoints changed and are proven")
