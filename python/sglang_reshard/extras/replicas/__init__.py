"""Passes weights on from one engine to another, without a trainer.

share  LiveWeights: engine ranks take part in an update of another engine, as its trainer ranks
pull   the other engine's side: asks a server to share, and serves the request that comes of it
"""
