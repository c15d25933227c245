"""Copies many regions at once: `copy_list.CopyList` is built once, and run in every update.

Regions that lie next to each other are merged before (`host_copies`). On a GPU one kernel makes all copies
of a list (`copy_kernel`, by the table of `copy_table`).
"""
