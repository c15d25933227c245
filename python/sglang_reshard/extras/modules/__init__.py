"""Plain torch modules instead of engines, in processes without SGLang."""
