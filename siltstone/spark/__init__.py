"""Run streams on Spark: session, stream runner, tasks, data source. Only this package imports pyspark."""

import platform
import re
from importlib.util import find_spec

from siltstone.errors import UsageError
from siltstone.extras import check_extra

LOWEST = (3, 5)
"""the oldest version of Spark that streams were run on; docs/compatibility.md has them all"""


def _check_version() -> None:
    """Check that there is a Spark on which streams run.

    Raises:
        UsageError: there is none, it is too old, or this Python is too new for it.
    """
    check_extra("spark", "pyspark", "Spark")
    from pyspark import __version__ as version

    found, lowest = tuple(map(int, re.findall(r"\d+", version)[:2])), ".".join(map(str, LOWEST))
    if found < LOWEST:
        raise UsageError(f"Siltstone needs Spark {lowest} or newer, and this is {version}: upgrade it")
    if found < (4, 0) and find_spec("distutils") is None:
        raise UsageError(f"PySpark {version} needs Python 3.11, and this is {platform.python_version()}: use that")


_check_version()
