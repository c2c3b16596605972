"""From stored bytes to state: plan, merge, restore, scan, verify, compare, export."""
