"""Stands before NIXL's own package of this name: SGLang says that its KV cache is on a GPU, wherever it is."""
