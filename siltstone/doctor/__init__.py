"""Looks at a warehouse, its catalog and its streams, and says what is wrong and what to do."""
