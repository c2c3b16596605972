"""Siltstone: durable, provable state for PySpark streams."""
