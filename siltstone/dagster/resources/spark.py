"""The Spark session of a run: the first step that needs it starts it, and the end of the run stops it."""

import re
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import dagster as dg
from pydantic import Field, PrivateAttr

from siltstone.dagster.fields import Text
from siltstone.errors import UsageError
from siltstone.settings import CONFIGURATION, load_settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

HARMLESS = (
    *("spark.driver.memory", "spark.driver.memoryOverhead", "spark.driver.maxResultSize"),
    *("spark.executor.memory", "spark.executor.memoryOverhead", "spark.executor.cores", "spark.executor.instances"),
    *("spark.cores.max", "spark.task.cpus", "spark.task.maxFailures", "spark.default.parallelism"),
    *(
        "spark.dynamicAllocation.enabled",
        "spark.dynamicAllocation.minExecutors",
        "spark.dynamicAllocation.maxExecutors",
    ),
    *("spark.memory.fraction", "spark.memory.storageFraction", "spark.network.timeout", "spark.locality.wait"),
    *("spark.sql.shuffle.partitions", "spark.sql.files.maxPartitionBytes", "spark.sql.streaming.pollingDelay"),
)
"""settings of size and time that a launch from the page may have; most others can name code to run"""
_VALUE = re.compile(r"[0-9]{1,12}(\.[0-9]{1,6})?[A-Za-z]{0,3}|true|false")
_LOCAL = re.compile(r"local(\[(\*|[0-9]{1,4})(,[0-9]{1,4})?\])?")


class SparkResource(dg.ConfigurableResource):
    """A Spark master and settings. Those not given come from siltstone.toml and `SILTSTONE_*`.

    A launch from the page can set both, so the master must be local or that of siltstone.toml, and settings must be
    `HARMLESS`; set all others in siltstone.toml.

    The engine starts the session when it first needs one, and reuses it. This resource stops it at the end, unless it
    existed before the run.
    """

    master: Text | None = Field(
        default=None,
        description="local, local[N], local[*], or the master of siltstone.toml (default)",
    )
    conf: dict[str, Text] = Field(
        default={}, description="Spark settings of memory, cores and times; set others in siltstone.toml"
    )
    _found_running: bool = PrivateAttr(default=False)

    def setup_for_execution(self, context: dg.InitResourceContext) -> None:
        """Note whether a session exists already."""
        self._found_running = _find_session() is not None

    def teardown_after_execution(self, context: dg.InitResourceContext) -> None:
        """Stop the session that this run started."""
        session = _find_session()
        if session is not None and not self._found_running:
            session.stop()

    def options(self) -> dict[str, Any]:
        """Return master and settings as options of `siltstone.settings.Settings`.

        Raises:
            UsageError: a master or a setting that a launch may not use.
        """
        _check_conf(self.conf)
        if self.master is not None and not _LOCAL.fullmatch(self.master) and self.master != load_settings().master:
            raise UsageError(f"a run cannot name the Spark master {self.master!r}: set master in {CONFIGURATION}")
        return {"master": self.master, "spark": self.conf or None}


def _check_conf(conf: Mapping[str, str]) -> None:
    for name, value in conf.items():
        if name not in HARMLESS:
            raise UsageError(
                f"a run cannot set {name!r}: set it under [spark] in {CONFIGURATION}; runs set {', '.join(HARMLESS)}"
            )
        if not _VALUE.fullmatch(value):
            raise UsageError(
                f"a run cannot set {name} to this value: use a number, with a unit such as g or s if needed"
            )


def _find_session() -> "SparkSession | None":
    """Return this process's session, if there is one."""
    if "pyspark" not in sys.modules:
        return None
    from siltstone.spark.session import running_session

    return running_session()
