"""Snapshots in a folder, or in an object store: who writes them, what is in one, and who reads them.

In: a trainer's state, which `writer` writes to a folder. Out: checkpoints on this host, and servers that have loaded
them, by `follower`.
"""
