"""Acts on decisions: restore, verify, snapshot; maps over key-group ranges."""
