"""Snapshots in a folder, or in an object store: what is in one, and who reads them.

In: folders that `trainer.snapshot` writes. Out: checkpoints on this host, and servers that have loaded them.
"""
