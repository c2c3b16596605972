"""The component that gives a stream its assets in a `dg` project."""

from collections.abc import Sequence
from typing import Annotated, Any

import dagster as dg
from dagster.components.utils.translation import TranslationFn, TranslationFnResolver
from pydantic import Field

from siltstone.dagster.definitions import stream_definitions
from siltstone.dagster.translator import StreamAsset, StreamTranslator


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
        """
        # Dagster merges two definitions of one name only if they are the same object, and before it merges, it copies
        # those of each component. So only one component may have what all streams share.
        components = context.component_tree.get_all_components(of_type=StreamComponent)
        return stream_definitions(
            self.stream,
            forks=self.forks,
            owners=self.owners,
            fresh_within_s=self.fresh_within_s,
            translator=_Translator(self.translation) if self.translation else None,
            shared=not components or components[0] is self,
        )


class _Translator(StreamTranslator):
    """Translates as the YAML says."""

    def __init__(self, translation: TranslationFn[StreamAsset]) -> None:
        self._translation = translation

    def get_asset_spec(self, asset: StreamAsset) -> dg.AssetSpec:
        return self._translation(asset.spec, asset)
