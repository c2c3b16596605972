"""The catalog records what exists and who refers to it: tables, one class per noun, fencing."""
