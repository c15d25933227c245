"""Engine ranks read exactly the elements that they lack from safetensors files: of a snapshot, without a trainer.

messages  the files, and where each tensor is in them
reader    opens the files, and reads boxes of tensors
sums      compares what all engine ranks have read with the checksums that the snapshot lists
engine    an engine rank's end of the route
"""
