"""Stored formats: blocks, bases, the index, segments, manifests, staged outputs."""
