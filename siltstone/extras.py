"""Packages that only some features need: extras of the distribution, as in `pip install 'siltstone[redis]'`."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

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
        raise _missing_extra_error(extra, package, what) from None


def check_extra(extra: str, package: str, what: str) -> None:
    """Check that a package is installed, without importing it; arguments as of `require_extra`.

    Raises:
        UsageError: it is not.
    """
    with require_extra(extra, package, what):
        if find_spec(package) is None:
            raise _missing_extra_error(extra, package, what)


def _missing_extra_error(extra: str, package: str, what: str) -> UsageError:
    return UsageError(f"{what} needs the package {package}: pip install 'siltstone[{extra}]'")
