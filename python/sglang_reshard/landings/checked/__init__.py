"""Compares what has arrived with what the trainer holds, by checksums: an engine rank's side and a trainer rank's."""
