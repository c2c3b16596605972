"""Suppress Dagster's many warnings about features in beta or preview."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import dagster as dg


@contextmanager
def without_beta_warnings() -> Iterator[None]:
    """Suppress Dagster's warnings about features in beta or preview; usable as a decorator, too."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dg.BetaWarning)
        warnings.simplefilter("ignore", dg.PreviewWarning)
        yield
