"""Run a stream in a process of its own, which a client of Dagster Pipes launches: here, on Kubernetes, on EMR.

    def on_kubernetes(context, command, extras):
        client = PipesK8sClient()
        return client.run(context=context, image="flights:1", command=["siltstone", *command], extras=extras)

    defs = stream_definitions("flights", launch=on_kubernetes)

The process needs `siltstone[pipes]`, and settings that name the same warehouse and catalog as here. It reports what it
made (`siltstone.pipes`), and the step succeeds only if the catalog here shows it.
"""

import importlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import dagster as dg
from dagster._core.errors import DagsterPipesExecutionError
from dagster._core.pipes.client import PipesClientCompletedInvocation

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.dagster.messages import WholeMessages
from siltstone.dagster.names import Keys, asset_key
from siltstone.errors import StateError, UsageError
from siltstone.pipes.parts import BY_DAGSTER, CHECKPOINTS
from siltstone.pipes.session import EXTRA
from siltstone.settings import Settings

STOPPING_S = 600.0
"""seconds that a run which is terminated has to end its step and take its checkpoint"""
Launch = Callable[[dg.AssetExecutionContext, Sequence[str], Mapping[str, Any]], PipesClientCompletedInvocation]
"""launches a command of `siltstone` by a Pipes client: context, arguments without `siltstone`, extras for the client"""
_CODE = re.compile(r"failed with code (\d+)")


class _Context(dg.AssetExecutionContext):
    """The context of a step that may skip assets; by default, a step with a Pipes session has to make all of them."""

    def set_requires_typed_event_stream(self, *, error_message: str | None = None) -> None:
        """Leave it at that: a run without input makes no base."""


class LaunchFailed(StateError):
    """A process that was launched by Pipes failed; its exit code is that of `siltstone.errors`, if the client tells."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.exit_code: int = code


def in_subprocess(
    context: dg.AssetExecutionContext, command: Sequence[str], extras: Mapping[str, Any]
) -> PipesClientCompletedInvocation:
    """Launch a process on this machine; if the step is terminated, it has ten minutes to end its run."""
    client = dg.PipesSubprocessClient(message_reader=WholeMessages(), termination_timeout_seconds=STOPPING_S)
    return client.run(context=context, command=[sys.executable, "-m", "siltstone.cli", *command], extras=dict(extras))


def launch_by_name(name: str) -> Launch:
    """Find a launch: `subprocess`, or a function as `module.function`.

    Raises:
        UsageError: there is none of this name.
    """
    if name == "subprocess":
        return in_subprocess
    module, _, function = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), function)
        if not callable(found):
            raise TypeError(f"a {type(found).__name__} is not a function")
        return cast(Launch, found)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise UsageError(f"launch is {name!r}: use subprocess, or MODULE.FUNCTION of yours ({error})") from None


def launch_run(
    launch: Launch, context: dg.AssetExecutionContext, settings: Settings, stream: str, command: Sequence[str]
) -> Iterator[dg.MaterializeResult]:
    """Launch a run, and yield what it reported.

    Raises:
        LaunchFailed: the process failed, reported nothing, or reported what the catalog does not show.
    """
    keys = Keys.of(context.assets_def.specs)
    given = {name.to_user_string(): key.to_escaped_user_string() for name, key in keys.items()}
    try:
        done = launch(_Context(context.op_execution_context), command, {EXTRA: {"keys": given}})
    except DagsterPipesExecutionError as error:
        found = _CODE.search(str(error))
        text = f"the run of stream {stream} that was launched failed: {error}; the log says why"
        raise LaunchFailed(text, int(found[1]) if found else LaunchFailed.exit_code) from error
    reported = done.get_results(implicit_materializations=False)
    results = [each for each in reported if isinstance(each, dg.MaterializeResult)]
    checkpoints = keys[asset_key(stream, CHECKPOINTS)]
    told = next((each for each in results if each.asset_key == checkpoints), None)
    _check_shown(settings, stream, f"{BY_DAGSTER}{context.run.run_id}", told)
    yield from results


def _check_shown(settings: Settings, stream: str, who: str, told: dg.MaterializeResult | None) -> None:
    """Raise LaunchFailed unless the catalog shows the run, and the checkpoint that it reported as its newest."""
    if told is None:
        raise LaunchFailed(
            f"the run of stream {stream} that was launched reported nothing: let it be `siltstone run {stream}` with "
            "siltstone[pipes], and the Pipes client's reader of messages reach it",
            UsageError.exit_code,
        )
    metadata: dict[str, Any] = {name: getattr(value, "value", value) for name, value in (told.metadata or {}).items()}
    with OpenWarehouse.open_existing(settings.warehouse, settings.catalog) as place:
        try:
            shown = any(run.who == who for run in place.catalog.runs.list(stream))
            if "checkpoint" in metadata:  # otherwise the stream has none yet
                record = place.catalog.checkpoints.get(stream, int(metadata["checkpoint"]))
                shown = shown and record.digest == metadata["digest"]
        except UsageError:  # no such checkpoint or stream
            shown = False
    if not shown:
        raise LaunchFailed(
            f"the run of stream {stream} that was launched reported checkpoint {metadata.get('checkpoint', 'none')}, "
            "and the catalog here does not show it as of that run: let both use the same warehouse and catalog",
            UsageError.exit_code,
        )
