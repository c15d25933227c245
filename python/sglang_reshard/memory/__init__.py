"""Exports a trainer rank's memory by handles, and maps it on engine ranks of the same host (`mapping`).

Host memory is shared by files (`shm`, `host_arena`), a GPU's by the handles of CUDA (`gpu_memory`).
"""
