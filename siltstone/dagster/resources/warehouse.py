"""The warehouse and catalog of streams, as a Dagster resource."""

import dagster as dg
from pydantic import Field

from siltstone.dagster.resources.spark import SparkResource
from siltstone.settings import Settings, load_settings


class WarehouseResource(dg.ConfigurableResource):
    """A warehouse and a catalog. Those not given come from siltstone.toml and `SILTSTONE_*`.

    Both are opened when a run needs them, never when definitions load. Give a catalog URL with a password as `EnvVar`.
    """

    url: str | None = Field(default=None, description="a path or file:// URL; default ./warehouse")
    catalog: str | None = Field(default=None, description="SQLAlchemy URL; default SQLite inside the warehouse")

    def settings(self, spark: SparkResource, **further: object) -> Settings:
        """Make the engine's settings for one operation.

        Args:
            further: further options by name; None means not given.

        Raises:
            UsageError: an unknown option, or a value that an option does not allow.
        """
        return load_settings(warehouse=self.url, catalog=self.catalog, **spark.options(), **further)
