"""Where Spark runs: one session a run, started by the first step that needs it, stopped at the run's end."""

import sys
from typing import TYPE_CHECKING, Any

import dagster as dg
from pydantic import Field, PrivateAttr

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class SparkResource(dg.ConfigurableResource):
    """A Spark master and settings. What is not given is as in siltstone.toml and `SILTSTONE_*`.

    The engine starts the session when it first needs one and then uses it again; this resource only ends it, unless
    it ran before the run began.
    """

    master: str | None = Field(
        default=None,
        description="Spark master URL, or sc://HOST[:PORT] of a Spark Connect server; default local, on all cores",
    )
    conf: dict[str, str] = Field(default={}, description="further Spark settings")
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
        """As options of `siltstone.settings.Settings`."""
        return {"master": self.master, "spark": self.conf or None}


def _running() -> "SparkSession | None":
    """This process's session, if there is one."""
    if "pyspark" not in sys.modules:
        return None
    from siltstone.spark.session import running_session

    return running_session()
