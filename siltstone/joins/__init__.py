"""Joins: operators that read two inputs and keep the rows of each until no partner can come."""
