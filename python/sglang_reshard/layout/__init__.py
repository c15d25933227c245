"""Integer geometry of sharded tensors, without torch.

In: the shapes, meshes and placements of a trainer's tensors, or shard boxes given explicitly. Out: a `SourceLayout`,
the same on every trainer rank, from which a `ShardMap` tells which trainer ranks hold which elements of a tensor.
A *box* is a contiguous range of element indices per dimension, a *region* a strided one. A *shard* is a box of a
tensor with the trainer ranks that hold it; a rank's *local tensor* has one shard, several, or none.
"""
