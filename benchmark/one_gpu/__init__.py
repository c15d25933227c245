"""A real SGLang engine on one GPU, which trainer ranks share with it."""
