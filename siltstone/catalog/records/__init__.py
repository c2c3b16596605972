"""What the catalog records: one class per noun, a module for each."""
