"""The streams of this repository. They import each other relatively: in the wheel they are siltstone.demo_streams."""

from .flights import FLIGHTS

__all__ = ["FLIGHTS"]
