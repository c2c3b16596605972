"""Report what a command did to the Dagster that launched it by Dagster Pipes; without one, do nothing.

Dagster says by two environment variables, or arguments, where the context is and where messages go. The command line
opens a session at its start. It then sends each line of progress as a log message, each result as a custom message, and
what the result says about assets and checks (`pipes.outcomes`) as materializations and check results.

A step of Dagster can say which assets are meant in its extras: `{"siltstone": {"keys": {NAME: KEY}}}`, where NAME is
that of `pipes.parts`, and KEY the asset's key as a text. Otherwise an asset of the step that has the name is meant, or
the step's only asset. Check results are sent if the extras have `{"siltstone": {"checks": true}}`, since Dagster takes
none that the step does not declare. A command whose checks are sent succeeds if one fails: Dagster is told.
"""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from siltstone.errors import SiltstoneError, UsageError, summarize
from siltstone.extras import require_extra
from siltstone.log import redact
from siltstone.pipes.parts import BY_DAGSTER, asset_name
from siltstone.result import Result

if TYPE_CHECKING:
    from dagster_pipes import PipesContext

    from siltstone.pipes.outcomes import CheckOutcome, Outcome
    from siltstone.settings import Settings

VARIABLES = ("DAGSTER_PIPES_CONTEXT", "DAGSTER_PIPES_MESSAGES")
ARGUMENTS = ("--dagster-pipes-context", "--dagster-pipes-messages")
EXTRA = "siltstone"
VOLUMES = "/Volumes/"
"""where Databricks mounts Unity Catalog"""


class Session:
    """A connection to the step of Dagster that launched this process.

    Attributes:
        settings: those of the command; None before it has made its client.
        sends_checks: whether the step takes check results. Then a command whose check fails reports that, and succeeds.
    """

    def __init__(self, context: "PipesContext") -> None:
        self._context = context
        self.settings: Settings | None = None
        # The keys of the assets that the step makes.
        self._scope: Sequence[str] = context.asset_keys if context.is_asset_step else ()
        given = context.extras.get(EXTRA, {})
        self._keys: dict[str, str] = dict(given.get("keys", {}))
        self.sends_checks: bool = given.get("checks") is True

    def close(self) -> None:
        """Send what is not sent yet, and end the connection."""
        self._context.close()

    def log(self, line: str) -> None:
        """Send a line to the log of the step's run."""
        self._context.log.info(redact(line))

    def fail(self, error: Exception) -> None:
        """Send an error to the log of the step's run."""
        text = error.full_text if isinstance(error, SiltstoneError) else summarize(error)
        self._context.log.error(f"siltstone: {redact(text)}")

    def owner_of(self, stream: str, part: str) -> str | None:
        """Return the owner that the catalog records for a run that this step reports; None if it makes no asset.

        Raises:
            UsageError: the step makes assets, and none of them is meant.
        """
        if not self._scope:
            return None
        self._key(asset_name(stream, part), is_main=True)
        return f"{BY_DAGSTER}{self._context.run_id}"

    def report(self, result: Result) -> None:
        """Report a result, and what it says about assets.

        Raises:
            UsageError: the step makes assets, and the operation's is none of them.
            SiltstoneError: what the result says is not in the catalog, or cannot be read.
        """
        self._context.report_custom_message({"result": type(result).__name__, **result.to_dict()})
        from siltstone.pipes.outcomes import outcomes_in

        if self.settings is not None:
            with_assets, with_checks = bool(self._scope), self.sends_checks
            for outcome, is_main in outcomes_in(
                self.settings, result, with_assets=with_assets, with_checks=with_checks
            ):
                self.tell(outcome, is_main=is_main)

    def tell(self, outcome: "Outcome | CheckOutcome", *, is_main: bool = True) -> None:
        """Report one outcome; one of an asset that the step does not make is left out, unless it is the main one."""
        from siltstone.pipes.outcomes import CheckOutcome

        key = self._key(outcome.asset, is_main=is_main)
        if key is None:
            return
        if isinstance(outcome, CheckOutcome):
            self._context.report_asset_check(
                outcome.check, outcome.passed, outcome.severity, metadata=outcome.metadata, asset_key=key
            )
        else:
            self._context.report_asset_materialization(outcome.metadata, outcome.version, key)

    def _key(self, name: str, *, is_main: bool) -> str | None:
        """Find the key of an asset by its name; None if the step does not make it and it is not the main one.

        Raises:
            UsageError: the main asset of an operation is not among those that the step makes.
        """
        scope, given = self._scope, self._keys
        key = given.get(name, name)
        if not scope or key in scope:
            return key
        if is_main and not given and len(scope) == 1:
            return scope[0]
        if is_main:
            raise UsageError(
                f"the step of Dagster makes {', '.join(scope)}, and none of them is {name}: pass "
                f'extras={{"{EXTRA}": {{"keys": {{"{name}": KEY}}}}}} to the Pipes client'
            )
        return None


_opened: list[Session] = []


def current_session() -> Session | None:
    """Return the session of this process, if there is one."""
    return _opened[-1] if _opened else None


def checks_session() -> Session | None:
    """Return the session of this process if its step takes check results."""
    session = current_session()
    return session if session is not None and session.sends_checks else None


@contextmanager
def pipes_session() -> Iterator[None]:
    """Open the session in a `with` block if this process was launched by Dagster Pipes.

    Raises:
        UsageError: it was, and the package dagster-pipes is missing, or the context or messages cannot be reached.
    """
    if _opened or not (VARIABLES[0] in os.environ or ARGUMENTS[0] in sys.argv):
        yield
        return
    session = _open()
    _opened.append(session)
    try:
        yield
    except Exception as error:
        with suppress(Exception):  # the error itself matters more
            session.fail(error)
        raise
    finally:
        _opened.clear()
        session.close()


def _open() -> Session:
    with require_extra("pipes", "dagster_pipes", "a process launched by Dagster Pipes"):
        import dagster_pipes as pipes
    by_environment = VARIABLES[0] in os.environ
    loader = pipes.PipesEnvVarParamsLoader() if by_environment else pipes.PipesCliArgsParamsLoader()
    try:
        at, to = loader.load_context_params(), loader.load_messages_params()
        session = Session(pipes.PipesContext(loader, _context_loader(pipes, at), _message_writer(pipes, to)))
    except Exception as error:  # of Dagster, of S3, of the file system
        where = " and ".join(VARIABLES if by_environment else ARGUMENTS)
        raise UsageError(
            f"cannot report to Dagster ({type(error).__name__}: {error}): check {where}, or take them away"
        ) from error
    sys.argv = _without_arguments(sys.argv)
    return session


def _context_loader(pipes: Any, params: Mapping[str, Any]) -> Any:
    return pipes.PipesS3ContextLoader(_s3()) if "bucket" in params else pipes.PipesDefaultContextLoader()


def _message_writer(pipes: Any, params: Mapping[str, Any]) -> Any:
    """Choose the writer that fits Dagster's reader: to S3, to a volume of Databricks, or to a file or stream."""
    if "bucket" in params:
        return pipes.PipesS3MessageWriter(_s3())
    if str(params.get("path", "")).startswith(VOLUMES):
        return pipes.PipesUnityCatalogVolumesMessageWriter()
    return pipes.PipesDefaultMessageWriter()


def _s3() -> Any:
    import boto3

    return boto3.client("s3")


def _without_arguments(arguments: Sequence[str]) -> list[str]:
    """Take Dagster's arguments, each with its value, out of a command line."""
    left, skip = list[str](), False
    for argument in arguments:
        if not skip and argument not in ARGUMENTS:
            left.append(argument)
        skip = not skip and argument in ARGUMENTS
    return left
