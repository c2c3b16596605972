"""Silences Dagster's warnings about its parts in beta or preview, of which each load would print many."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import dagster as dg


@contextmanager
def without_beta_warnings() -> Iterator[None]:
    """Leave out Dagster's warnings that a part is in beta or preview; also a decorator of functions."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dg.BetaWarning)
        warnings.simplefilter("ignore", dg.PreviewWarning)
        yield
