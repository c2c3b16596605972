"""What exists and who refers to it: manifests, catalog tables, the repository, fencing."""
