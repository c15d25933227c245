"""Deltas: what changes in training, and what that saves on links between hosts."""
