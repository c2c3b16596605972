"""What is kept and what goes: leases, savepoints, truncation, deletion, orphans, sweeping."""
