"""Lossless deltas of messages and of files: the changed elements, as integers, in the form with the fewest bytes."""
