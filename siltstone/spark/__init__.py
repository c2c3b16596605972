"""Run streams on Spark: session, stream runner, tasks, data source. Only this package imports pyspark."""

import platform
import re
from importlib.util import find_spec

from siltstone.errors import UsageError
from siltstone.extras import check_extra

LOWEST = (3, 5)
"""the oldest version of Spark that streams were run on; docs/compatibility.md has them all"""

check_extra("spark", "pyspark", "Spark")

from pyspark import __version__ as _version  # noqa: E402

_found = tuple(map(int, re.findall(r"\d+", _version)[:2]))
if _found < LOWEST:
    raise UsageError(f"Siltstone needs Spark {'.'.join(map(str, LOWEST))} or newer, and this is {_version}: upgrade it")
if _found < (4, 0) and find_spec("distutils") is None:
    raise UsageError(f"PySpark {_version} needs Python 3.11, and this is {platform.python_version()}: use that")
