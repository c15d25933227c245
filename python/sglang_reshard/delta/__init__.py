"""Lossless deltas of messages and of files: what has changed, as integers, in whichever form takes the fewest bytes."""
