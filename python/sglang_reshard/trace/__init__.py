"""Traces an engine's own `load_weights`: which checkpoint element ends up where in one engine rank's live memory.

In:  a model, and names, shapes and dtypes of the checkpoint tensors. No weights.
Out: a `program.Program`: strided copies into live storages (what a plan moves), then steps local to the rank.

lazy tensor     stands for a checkpoint tensor while the loader runs; has a shape and a dtype, but no memory
live tensor     a parameter, a buffer or a tensor attribute of a module, in the engine's memory
record          one write to a live storage that the loader would have made
index map       pairs of elements (read here, written there), as nested strided loops

Imports nothing: `tracer.trace` is the entry point, `program` has the result's classes.
"""
