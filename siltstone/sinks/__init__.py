"""Where outputs go once their checkpoint is complete."""
