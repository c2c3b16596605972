"""The component that gives a stream its assets in a `dg` project."""

from collections.abc import Sequence

import dagster as dg
from pydantic import Field

from siltstone.dagster.definitions import stream_definitions


class StreamComponent(dg.Component, dg.Model, dg.Resolvable):
    """A Siltstone stream: its assets, checks, jobs, schedules and sensors, and those of its forks.

        type: siltstone.dagster.StreamComponent
        attributes:
          stream: flights
          forks: [flights-what-if]

    A project can have several components, each with a stream of its own.
    """

    stream: str = Field(description="name of a stream in the modules listed in siltstone.toml")
    forks: Sequence[str] = Field(default=(), description="names of its forks that have no definition of their own")
    owners: Sequence[str] = Field(default=(), description="emails, or teams as team:NAME, shown with each asset")
    fresh_within_s: float | None = Field(
        default=None, description="a new checkpoint is expected within this many seconds (60 or more); default none"
    )

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        """Build the stream's definitions.

        Raises:
            UnknownStream: no stream of that name is defined; the message lists those found.
        """
        return stream_definitions(self.stream, forks=self.forks, owners=self.owners, fresh_within_s=self.fresh_within_s)
