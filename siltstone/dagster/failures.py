"""Siltstone's errors as Dagster shows them best: one line that says what to do, without a traceback to read."""

from collections.abc import Iterator
from contextlib import contextmanager

import dagster as dg

from siltstone.errors import Fenced, SiltstoneError, Stopped, UsageError


@contextmanager
def told_clearly() -> Iterator[None]:
    """Turn an error of the engine into a failed step; no retry follows where it could not help.

    The traceback is left out: it is of the engine's code, and the line says what to do.

    Raises:
        DagsterExecutionInterruptedError: somebody stopped the run, which is then not failed but canceled.
        Failure: with the error's own line, its class and its exit code.
    """
    try:
        yield
    except Stopped as stopped:
        raise dg.DagsterExecutionInterruptedError(str(stopped)) from None
    except SiltstoneError as error:
        raise dg.Failure(
            description=error.told,
            metadata={"error": type(error).__name__, "exit_code": error.exit_code},
            # Bad input stays bad, and who was fenced must not take the stream back from who fenced it.
            allow_retries=not isinstance(error, UsageError | Fenced),
        ) from None
