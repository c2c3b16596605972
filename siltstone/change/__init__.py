"""Changes of a stream: recovery, rollback, replay, edits, other parallelism, forks."""
