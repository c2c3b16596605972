"""The warehouse and catalog of streams, as a Dagster resource."""

import dagster as dg
from pydantic import Field

from siltstone.dagster.fields import Text
from siltstone.dagster.resources.spark import SparkResource
from siltstone.errors import UsageError
from siltstone.settings import CONFIGURATION, Settings, load_settings


class WarehouseResource(dg.ConfigurableResource):
    """A warehouse and a catalog. Those not given come from siltstone.toml and `SILTSTONE_*`.

    A launch from the page can set both, so they must be those of the settings, or be listed there under [ui]. Both are
    opened when a run needs them, never when definitions load.
    """

    url: Text | None = Field(default=None, description="the warehouse of siltstone.toml (default), or one it lists")
    catalog: Text | None = Field(default=None, description="the catalog of siltstone.toml (default), or one it lists")

    def settings(self, spark: SparkResource, **further: object) -> Settings:
        """Make the engine's settings for one operation.

        Args:
            further: further options by name; None means not given.

        Raises:
            UsageError: an unknown option, a value that an option does not allow, or a warehouse or catalog that is
                neither that of the settings nor listed there.
        """
        allowed = load_settings()
        for name, given, known in (
            ("warehouse", self.url, (allowed.warehouse, *allowed.ui.warehouses)),
            ("catalog", self.catalog, (allowed.catalog, *allowed.ui.catalogs)),
        ):
            if given is not None and given not in known:
                raise UsageError(
                    f"a run cannot name this {name}: use that of {CONFIGURATION}, or list its URL there as [ui] {name}s"
                )
        return load_settings(warehouse=self.url, catalog=self.catalog, **spark.options(), **further)
