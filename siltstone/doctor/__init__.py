"""Examine a warehouse, its catalog and its streams, and report what is wrong and what to do."""
