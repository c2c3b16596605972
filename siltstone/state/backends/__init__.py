"""Backends of working state."""
