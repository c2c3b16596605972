"""Time in a stream: its event times, and the clock of each step."""
