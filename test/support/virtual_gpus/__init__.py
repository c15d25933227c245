"""GPUs that CPU tests can break the rules of.

description  hosts, GPUs, and what each process sees of them
memory       GPU memory of a process: files that other processes can really map
libcuda      the driver's functions for handles
torch_cuda   torch.cuda, and torch's idea of where a tensor is
streams      what a process has given to its GPUs, done when it is waited for
torch_ops    torch's own operations, in the order of streams
captures     captures of CUDA graphs, and who breaks them
kernel       the copies of the Triton kernel, at checked addresses
nccl         process groups that punish what NCCL punishes
nixl         agents that read registered pages, wherever these are
environment  a process's environment, compared
journal      what all processes did, and the rules that they broke
process      gives a process its GPUs
world        runs trainer ranks and engine ranks with them

A rule that is broken raises in its process, and again at the end of the test, whatever became of the error.
"""
