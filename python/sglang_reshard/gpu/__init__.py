"""Describes the GPUs of ranks, and makes the only calls of the CUDA driver and of `torch.cuda` that updates make.

rank_info      RankGpuInfo: the GPU facts that each rank announces
driver         CudaDriver: the CUDA driver's calls for memory handles, through ctypes
runtime        CudaRuntime: what the rest of the package asks about memory, devices and streams
recorded_work  RecordedWork: what one thread has given to GPUs, for another one to wait for
"""
