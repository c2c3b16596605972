"""What happens by itself when something upstream changed; turn it on in the page under Automation."""

import dagster as dg

RESTORE = (dg.AutomationCondition.eager() & dg.AutomationCondition.all_deps_blocking_checks_passed()).with_label(
    "when checkpoints changed and are proven"
)
"""restored state: its newest partition, or those that are missing"""
