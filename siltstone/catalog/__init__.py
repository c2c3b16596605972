"""The catalog records what exists and who refers to it: tables, one class per noun, fencing.

`repository` is an open catalog; beside it is what concerns all of it: identity, epochs, backup, extracts, upgrades.
`records` has what is recorded, one class per noun, and `database` tables, migrations, engine and transactions.
"""
