"""A ready-made operator for SQL's aggregates, and its functions."""
