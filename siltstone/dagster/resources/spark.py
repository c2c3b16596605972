"""Where Spark runs: one session a run, started by the first step that needs it, stopped at the run's end."""

import re
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import dagster as dg
from pydantic import Field, PrivateAttr

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
"""settings that a run may be launched with from the page: how much and how long. Most others can name code to run"""
_VALUE = re.compile(r"[0-9]{1,12}(\.[0-9]{1,6})?[A-Za-z]{0,3}|true|false")
_LOCAL = re.compile(r"local(\[(\*|[0-9]{1,4})(,[0-9]{1,4})?\])?")


class SparkResource(dg.ConfigurableResource):
    """A Spark master and settings. What is not given is as in siltstone.toml and `SILTSTONE_*`.

    Both can be given with a launch from the page, so a master is that of siltstone.toml or a local one, and settings
    are `HARMLESS` ones; all others are for siltstone.toml.

    The engine starts the session when it first needs one and then uses it again; this resource only ends it, unless
    it ran before the run began.
    """

    master: str | None = Field(
        default=None,
        description="local, local[N], local[*], or the master of siltstone.toml, which is the default",
    )
    conf: dict[str, str] = Field(
        default={}, description="further Spark settings, of memory, cores and times; others in siltstone.toml"
    )
    _found_running: bool = PrivateAttr(default=False)

    def setup_for_execution(self, context: dg.InitResourceContext) -> None:
        """Note whose the session is."""
        self._found_running = _running() is not None

    def teardown_after_execution(self, context: dg.InitResourceContext) -> None:
        """Stop the session that this run started."""
        session = _running()
        if session is not None and not self._found_running:
            session.stop()

    def options(self) -> dict[str, Any]:
        """As options of `siltstone.settings.Settings`.

        Raises:
            UsageError: a master or a setting that a launch may not name.
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
            raise UsageError(f"a run cannot set {name} so: give a number, with a unit such as g or s where it has one")


def _running() -> "SparkSession | None":
    """This process's session, if there is one."""
    if "pyspark" not in sys.modules:
        return None
    from siltstone.spark.session import running_session

    return running_session()
