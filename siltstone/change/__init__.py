"""Change a stream: recover, roll back, replay, edit, rescale, fork."""
