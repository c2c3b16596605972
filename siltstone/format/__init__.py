"""Every stored byte: blocks, bases, the index, segments, manifests, staged outputs."""
