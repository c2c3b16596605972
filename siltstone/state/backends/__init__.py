"""The backends of working state."""
