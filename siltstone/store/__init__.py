"""Stores: the protocol, its implementations, and every object name and path."""
