"""The streams of this repository."""

from streams.flights import FLIGHTS

__all__ = ["FLIGHTS"]
