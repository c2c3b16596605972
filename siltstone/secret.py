"""Secrets: read from an environment variable, or from a file that such a variable names, and never stored.

`VARIABLE` holds the secret, or `VARIABLE_FILE` the path of a file that contains it, as orchestrators mount them.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from siltstone.errors import UsageError

FILE = "_FILE"
HIDDEN = "***"


@dataclass(frozen=True)
class Secret:
    """A source option that is secret: `Stream(options={"password": Secret("EVENTS_PASSWORD")})`.

    It is read when a run opens the source, so it may change from run to run. It is neither recorded with the stream,
    nor compared with an earlier value, nor shown.

    Args:
        variable: the environment variable that holds it; `VARIABLE_FILE` may hold the path of a file instead.
    """

    variable: str

    def read(self) -> str:
        """Return the secret's current value.

        Raises:
            UsageError: neither variable is set, or the file cannot be read.
        """
        found = read_variable(self.variable)
        if found is None:
            raise UsageError(f"a secret is missing: set {self.variable}, or {self.variable}{FILE} to a file's path")
        return found

    def __str__(self) -> str:
        return f"(secret, in {self.variable})"


def read_variable(name: str, environment: Mapping[str, str | None] = os.environ, suffix: str = FILE) -> str | None:
    """Return a variable's value, or else the content of the file that its companion names, without the newline at its
    end; None if neither is set.

    Raises:
        UsageError: the file cannot be read.
    """
    found = environment.get(name)
    path = environment.get(f"{name}{suffix}")
    if found is not None or not path:
        return found
    try:
        return Path(path).read_text().rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UsageError(
            f"cannot read {path}, which {name.upper()}{suffix.upper()} names: {why}; check the path and who may read it"
        ) from None


def hide(text: str, secrets: Iterable[str]) -> str:
    """Replace each of the secrets in the text with `***`."""
    for secret in sorted(filter(None, secrets), key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    return text
