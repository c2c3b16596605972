"""What a manifest says in numbers is checked where it is decoded, since reports and policies compute with it."""

from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from siltstone.chains.policy_rules import PolicyState
from siltstone.errors import CorruptObject
from siltstone.format.manifest import Manifest, encode_manifest
from siltstone.format.manifest_decoding import COUNTS, MAY_BE_NULL, decode_manifest
from siltstone.model import Form
from tests.stored import bare_statistics

SAID = bare_statistics("op", rows=1, parallelism=2)
TABLE = {"D": 1, "chain": {"first": 1, "log_ratio": None}, "form": "base", "whole": [7, 0.5]}
TIMES: dict[str, Any] = {"from": 1, "checkpoints": [[1, 0, None]], "steps": [[1, 0, 7]]}


def _manifest(statistics: dict[str, Any]) -> Manifest:
    shape = {"key": [["k", "int64"]], "subkey": [], "value": [["s", "string"]]}
    operators = {"op": {"key": [["k", "int64"]], "variables": {"totals": {"tables": {"totals": shape}}}}}
    digests = {"op": {"totals": np.zeros(2, np.uint64)}}
    forms, versions = {"op": Form.DELTA}, {"op": {"totals": [(0, 2)]}}
    return Manifest("s", 2, 1, 2, 2, operators, [], [], digests, forms, statistics=statistics, versions=versions)


def _operator(**changed: Any) -> dict[str, Any]:
    return SAID | {"operators": {"op": SAID["operators"]["op"] | changed}}


@pytest.mark.parametrize(
    "statistics",
    [
        SAID,
        SAID | {"unknown": [], "dead_letters": {"op": 3}, "times": TIMES},
        _operator(seconds={"open": 1.5}, opaque={"v": [1, 2, 0.5]}, tables={"totals": TABLE}, restore_bound_s=1e300),
        _operator(chain={"first": 1, "base_bytes": 7.5}),
    ],
)
def test_what_a_run_says_is_read(statistics: dict[str, Any]) -> None:
    assert decode_manifest(encode_manifest(_manifest(statistics))).statistics == statistics


@pytest.mark.parametrize(
    "statistics",
    [
        {},
        SAID | {"parallelism": 3},
        {key: value for key, value in SAID.items() if key != "state_rows"},
        SAID | {"operators": {}},
        SAID | {"outputs": []},
        SAID | {"outputs": 0},
        SAID | {"uploads": {"attempts": float("nan")}},
        SAID | {"unknown": [[float("-inf")]]},
        SAID | {"rows_in": 1 << 63},
        SAID | {"dead_letters": {"op": "1"}},
        SAID | {"operators": SAID["operators"] | {"../x": SAID["operators"]["op"]}},
        *(
            _operator(**changed)
            for changed in (
                {"seconds": {"open": "1"}},
                {"restore_bound_s": float("nan")},
                {"tables": {"v": [1, 2]}},
                {"tables": {"totals": {"D": 1}}},
                {"tables": {"totals": TABLE | {"chain": {"first": 0}}}},
                {"tables": {"totals": TABLE | {"chain": {"deltas": []}}}},
                {"tables": {"totals": TABLE | {"chain": {"base_rows": None}}}},
                {"tables": {"totals": TABLE | {"chain": {"deltas": 0.5}}}},
                {"tables": {"totals": TABLE | {"chain": {"base_s": None}}}},
                {"tables": {"totals": TABLE | {"form": "other"}}},
                {"tables": {"totals": TABLE | {"whole": 7}}},
                {"tables": {"totals": TABLE | {"chain": {"base_bytes": "7"}}}},
            )
        ),
        *(
            SAID | {"times": TIMES | changed}
            for changed in ({"from": 10**15}, {"checkpoints": [[]]}, {"checkpoints": [[1, "2"]]}, {"steps": [[1, 2]]})
        ),
    ],
)
def test_crafted_statistics_are_refused(statistics: dict[str, Any]) -> None:
    with pytest.raises(CorruptObject, match=r"s/1/m\.arrow cannot be read as a manifest"):
        decode_manifest(encode_manifest(_manifest(statistics)), "s/1/m.arrow")


def test_a_chain_that_is_read_is_one_that_policies_read() -> None:
    """A null where they want a number made an imported stream that no report could show."""
    assert {field.name for field in fields(PolicyState) if isinstance(field.default, int)} == COUNTS
    assert {field.name for field in fields(PolicyState) if field.default is None} == MAY_BE_NULL
