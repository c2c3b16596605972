"""Report Siltstone's errors to Dagster as one line that says what to do, without a traceback."""

from collections.abc import Iterator
from contextlib import contextmanager

import dagster as dg

from siltstone.errors import SiltstoneError, Stopped, Unreachable

RETRIES = dg.RetryPolicy(max_retries=2, delay=10, backoff=dg.Backoff.EXPONENTIAL)
"""of steps that may be repeated, as when a store is away for a moment. A run resets itself, and then is recovered"""


@contextmanager
def report_errors() -> Iterator[None]:
    """Turn an error of the engine into a failed step, without a traceback. Retries are allowed only if they may help.

    Raises:
        DagsterExecutionInterruptedError: the run was stopped, and becomes canceled, not failed.
        Failure: any other error, with its message, class and exit code.
    """
    try:
        yield
    except Stopped as stopped:
        raise dg.DagsterExecutionInterruptedError(str(stopped)) from None
    except SiltstoneError as error:
        raise dg.Failure(
            description=error.full_text,
            metadata={"error": type(error).__name__, "exit_code": error.exit_code},
            # Bad input and damage stay, and a fenced run must not take the stream back from the newer one.
            allow_retries=error.exit_code == Unreachable.exit_code,
        ) from None
