"""The demo throws away what it made itself, and nothing else."""

from pathlib import Path

import pytest

from siltstone.demo import MARK, _make_room
from siltstone.errors import UsageError


def warehouse(root: Path, *streams: str) -> Path:
    for name in streams:
        (root / "objects" / name / "00000001").mkdir(parents=True)
        (root / "work" / name / "00000001").mkdir(parents=True)
    (root / "objects" / ".tmp").mkdir(parents=True)
    return root


def test_what_an_earlier_demo_left_goes(tmp_path: Path) -> None:
    root = warehouse(tmp_path / "w", "flights")
    (root / MARK).touch()
    _make_room(root)
    assert not root.exists()
    _make_room(root)


@pytest.mark.parametrize(("mark", "said"), [(False, "was not made by the demo"), (True, "now holds mine too")])
def test_what_somebody_else_made_stays(mark: bool, said: str, tmp_path: Path) -> None:
    root = warehouse(tmp_path / "w", "flights", "mine")
    if mark:
        (root / MARK).touch()
    with pytest.raises(UsageError, match=said):
        _make_room(root)
    assert (root / "objects" / "mine").is_dir()
