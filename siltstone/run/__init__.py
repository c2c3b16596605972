"""A stream while it runs: the consistent region, a subtask's step, working state, the outbox."""
