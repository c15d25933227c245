"""Updates the weights of a running vLLM engine, on all of its workers."""
