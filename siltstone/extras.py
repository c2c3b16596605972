"""Packages that only some features need: extras of the distribution, as in `pip install 'siltstone[redis]'`."""

from collections.abc import Iterator
from contextlib import contextmanager

from siltstone.errors import UsageError


@contextmanager
def require_extra(extra: str, package: str, what: str) -> Iterator[None]:
    """Translate a failed import of `package` in a `with` block into an error that says what to install.

    Args:
        extra: the name of the extra.
        package: the package that it installs, as it is imported.
        what: the feature that needs it, for the message.

    Raises:
        UsageError: the package is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise
        raise UsageError(f"{what} needs the package {package}: pip install 'siltstone[{extra}]'") from None
