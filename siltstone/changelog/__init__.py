"""How changes become durable: blocks, the index, segments and their packing."""
