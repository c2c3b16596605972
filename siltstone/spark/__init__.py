"""Run streams on Spark: session, stream runner, tasks, data source. Only this package imports pyspark."""

import re

from siltstone.errors import UsageError
from siltstone.extras import check_extra

LOWEST = (3, 5)
"""the oldest version of Spark that streams were run on; docs/compatibility.md has them all"""

check_extra("spark", "pyspark", "Spark")

from pyspark import __version__ as _version  # noqa: E402

if (found := re.match(r"(\d+)\.(\d+)", _version)) and tuple(map(int, found.groups())) < LOWEST:
    raise UsageError(f"Siltstone needs Spark {'.'.join(map(str, LOWEST))} or newer, and this is {_version}: upgrade it")
