"""What exists and who refers to it: catalog tables, the repository, fencing."""
