"""Decide what is kept and delete the rest: leases, savepoints, truncation, deletion, orphans, sweeping."""
