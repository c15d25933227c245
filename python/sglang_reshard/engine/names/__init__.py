"""Names under which an engine's loader reads a trainer's tensors, if it does not read the given ones."""
