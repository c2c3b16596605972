"""Let a project give a stream's assets keys and attributes of its own, so that they fit among its other assets.

    class Ours(StreamTranslator):
        def get_asset_spec(self, asset: StreamAsset) -> dg.AssetSpec:
            if asset.part == "events":  # what another tool loads
                return asset.spec.replace_attributes(key=dg.AssetKey(["raw", "flights"]))
            return asset.spec.replace_attributes(group_name="streaming")

    defs = stream_definitions("flights", translator=Ours())

`events` under another key is an asset that the project defines itself: Siltstone only depends on it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import dagster as dg

from siltstone.dagster.names import asset_of, mark
from siltstone.stream import Stream

Asset = dg.AssetSpec | dg.AssetsDefinition


@dataclass(frozen=True)
class StreamAsset:
    """An asset of a stream, as it is if nothing is translated.

    Attributes:
        stream: its stream.
        operator: the operator that it is of; None for an asset of the whole stream.
        part: what it is: `events`, `base_checkpoint`, `delta_chain`, `sink`, `checkpoints`, `materialization`,
            `full_snapshot` or `restored_state`.
        spec: its key, dependencies and attributes.
    """

    stream: Stream
    operator: str | None
    part: str
    spec: dg.AssetSpec


class StreamTranslator:
    """Says how each asset of a stream looks in Dagster. This one leaves all as they are."""

    def get_asset_spec(self, asset: StreamAsset) -> dg.AssetSpec:
        """Return the asset's spec: key, group, tags, kinds, owners, description and metadata may differ from
        `asset.spec`. Dependencies follow the keys by themselves."""
        return asset.spec


def translate(
    assets: Iterable[Asset],
    checks: Iterable[dg.AssetsDefinition],
    streams: Iterable[Stream],
    translator: StreamTranslator,
) -> tuple[list[Asset], list[dg.AssetsDefinition]]:
    """Translate all assets of some streams, and the keys of what the checks are about."""
    by_name = {stream.name: stream for stream in streams}
    renamed: dict[dg.AssetKey, dg.AssetKey] = {}

    def of(spec: dg.AssetSpec) -> dg.AssetSpec:
        operator, part = asset_of(spec.key)
        given = translator.get_asset_spec(StreamAsset(by_name[spec.key.path[0]], operator, part, spec))
        if given.key != spec.key:
            renamed[spec.key] = given.key
        return mark(given.replace_attributes(key=spec.key))  # by what it is marked with, it is found under any key

    # Of a stream, only its events are a spec alone. Under another key, they are somebody else's asset.
    translated = list(dg.map_asset_specs(of, list(assets)))
    if not renamed:
        return translated, list(checks)
    ours = [each for each in translated if not (isinstance(each, dg.AssetSpec) and each.key in renamed)]
    keyed = [each if isinstance(each, dg.AssetSpec) else _rename(each, renamed) for each in ours]
    return keyed, [_rename(check, renamed) for check in checks]


def _rename(definition: dg.AssetsDefinition, renamed: Mapping[dg.AssetKey, dg.AssetKey]) -> dg.AssetsDefinition:
    return definition.with_attributes(asset_key_replacements=renamed)
