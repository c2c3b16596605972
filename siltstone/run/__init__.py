"""Run a stream: the consistent region, a subtask's step, working state, the outbox."""
