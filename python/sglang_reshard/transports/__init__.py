"""Moves weights from trainer ranks into an engine rank's live parameters.

A transport is built once from a plan (`base.TransportContext`), with all views and buffers, and run once per update:
`ipc` reads mapped trainer memory, `p2p` receives what trainer ranks send, `broadcast` shares whole shards in groups of
engine ranks. `memory` exports and maps trainer memory (`gpu_memory`, `host_arena`, `shm`), `communicator` sends,
receives and broadcasts over process groups (`abortable_group`) of `gloo` and `nccl`.
"""
