"""Updates the transformers of SGLang's diffusion engine, in the processes that hold them."""
