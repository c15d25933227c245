"""Updates in the background, from a copy of the weights, while the trainer goes on."""
