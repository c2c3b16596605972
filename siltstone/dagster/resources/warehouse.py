"""Where streams live: a warehouse and its catalog."""

import dagster as dg
from pydantic import Field

from siltstone.dagster.resources.spark import SparkResource
from siltstone.settings import Settings, load_settings


class WarehouseResource(dg.ConfigurableResource):
    """A warehouse and a catalog. What is not given is as in siltstone.toml and `SILTSTONE_*`.

    Both are looked at when a run needs them, never when definitions load. A catalog URL with a password is best given
    as `EnvVar`.
    """

    url: str | None = Field(default=None, description="a path or file:// URL; default ./warehouse")
    catalog: str | None = Field(default=None, description="SQLAlchemy URL; default SQLite inside the warehouse")

    def settings(self, spark: SparkResource, **further: object) -> Settings:
        """The engine's settings for one operation; `further` are options by name, None where not given.

        Raises:
            UsageError: an unknown option or a value out of range.
        """
        return load_settings(warehouse=self.url, catalog=self.catalog, **spark.options(), **further)
