"""The component that gives a stream its assets in a `dg` project."""

from collections.abc import Sequence
from typing import Annotated, Any

import dagster as dg
from dagster.components.resolved.core_models import OpSpec
from dagster.components.utils.translation import TranslationFn, TranslationFnResolver
from pydantic import Field

from siltstone.dagster.definitions import stream_definitions
from siltstone.dagster.launch import launch_by_name
from siltstone.dagster.names import NO_OPTIONS, OpOptions
from siltstone.dagster.translator import StreamAsset, StreamTranslator
from siltstone.errors import UsageError


def _variables_of(asset: StreamAsset) -> dict[str, Any]:
    return {"stream": asset.stream.name, "operator": asset.operator, "part": asset.part}


class StreamComponent(dg.Component, dg.Model, dg.Resolvable):
    """A Siltstone stream: its assets, checks, jobs, schedules and sensors, and those of its forks.

        type: siltstone.dagster.StreamComponent
        attributes:
          stream: flights
          forks: [flights-what-if]
          translation:
            key: "lake/{{ stream }}/{{ spec.key.path[-1] }}"
            group_name: streaming

    A project can have several components, each with a stream of its own. The first has what all of them share.
    """

    stream: str = Field(description="name of a stream in the modules listed in siltstone.toml")
    forks: Sequence[str] = Field(default=(), description="names of its forks that have no definition of their own")
    owners: Sequence[str] = Field(default=(), description="emails, or teams as team:NAME, shown with each asset")
    fresh_within_s: float | None = Field(
        default=None, description="a new checkpoint is expected within this many seconds (60 or more); default none"
    )
    select: str | None = Field(
        default=None,
        description="which assets to define, in Dagster's syntax, such as not tag:siltstone/part=full_snapshot (all); "
        "those that a run makes come together",
    )
    op: OpSpec | None = Field(
        default=None, description="tags and pool of the steps, and the backfill policy of restored state"
    )
    launch: str | None = Field(
        default=None,
        description="runs in processes of their own: subprocess, or MODULE.FUNCTION that calls a client of Dagster "
        "Pipes; default in the process of the step; see siltstone.dagster.launch",
    )
    translation: Annotated[
        TranslationFn[StreamAsset] | None,
        TranslationFnResolver[StreamAsset](template_vars_for_translation_fn=_variables_of),
    ] = Field(
        default=None,
        description="key and attributes of each asset; {{ stream }}, {{ operator }}, {{ part }} and {{ spec }} tell "
        "which one it is; see siltstone.dagster.StreamAsset",
    )

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        """Build the stream's definitions.

        Raises:
            UnknownStream: no stream of that name is defined; the message lists those found.
            UsageError: an option is not valid.
        """
        if self.op is not None and (self.op.name or self.op.description):
            raise UsageError(
                "op has a name or a description, which are the step's own: give tags, pool, backfill_policy"
            )
        # Dagster merges two definitions of one name only if they are the same object, and before it merges, it copies
        # those of each component. So only one component may have what all streams share.
        components = context.component_tree.get_all_components(of_type=StreamComponent)
        return stream_definitions(
            self.stream,
            forks=self.forks,
            owners=self.owners,
            fresh_within_s=self.fresh_within_s,
            translator=_Translator(self.translation) if self.translation else None,
            launch=launch_by_name(self.launch) if self.launch else None,
            select=self.select,
            op=OpOptions(self.op.tags or {}, self.op.pool, self.op.backfill_policy) if self.op else NO_OPTIONS,
            shared=not components or components[0] is self,
        )


class _Translator(StreamTranslator):
    """Translates as the YAML says."""

    def __init__(self, translation: TranslationFn[StreamAsset]) -> None:
        self._translation = translation

    def get_asset_spec(self, asset: StreamAsset) -> dg.AssetSpec:
        return self._translation(asset.spec, asset)
