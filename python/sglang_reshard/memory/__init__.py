"""Shares a trainer rank's memory by handles (`mapping`), and maps it on engine ranks of the same host (`peer_memory`).

Host memory is shared by files (`shm`, `host_arena`), a GPU's by the handles of CUDA (`gpu_memory`). Engine ranks map
what they read, and nothing else.
"""
