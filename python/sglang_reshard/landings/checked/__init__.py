"""Compares the arrived weights with the trainer's, by checksums: an engine rank's side and a trainer rank's."""
