"""A ready-made operator, SQL's aggregates, and the arithmetic that it is made of."""
