"""The streams of this repository. Imports are relative, because in the wheel this package is siltstone.demo_streams."""

from .flights import FLIGHTS

__all__ = ["FLIGHTS"]
