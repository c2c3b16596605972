"""Packages that only some uses need, asked for by name where they are missing.

They are extras of the distribution: `pip install 'siltstone[redis]'`. What needs one imports it here, when it is used.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from siltstone.errors import UsageError


@contextmanager
def extra_needed(extra: str, package: str, what: str) -> Iterator[None]:
    """Import, in a `with` block, what needs `package` of an extra.

    Args:
        extra: the name of the extra.
        package: the package that it brings, as it is imported.
        what: what cannot be had without it, for people.

    Raises:
        UsageError: the package is not installed; says what to install.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise
        raise UsageError(f"{what} needs the package {package}: pip install 'siltstone[{extra}]'") from None
