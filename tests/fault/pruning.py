"""Input logs that are pruned by the step, so that streams as short as those of the campaign meet it."""

import inspect

from siltstone.catalog.records.input_log import InputLog

AT_LEAST = 1


def prune_early() -> None:
    """Let this process prune as few steps at once as there are; the engine waits for a hundred."""
    defaults = inspect.unwrap(InputLog.prune).__kwdefaults__
    assert "at_least" in defaults
    defaults["at_least"] = AT_LEAST
