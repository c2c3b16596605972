"""The catalog records what exists and who refers to it: tables, one class per noun, fencing.

    repository   an open catalog; beside it what concerns all of it: identity, epochs, backup, extracts, upgrades
    records      what is recorded: one class per noun
    database     tables, migrations, engine and transactions
"""
