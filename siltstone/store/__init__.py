"""Where bytes lie: the store protocol, its implementations, and every path."""
