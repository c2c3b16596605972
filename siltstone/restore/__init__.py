"""Turn stored bytes into state: plan, merge, restore, scan, verify, compare, export."""
