"""`python -m benchmark.soak`: thousands of updates of one server that is asked to generate all the while.

__main__   the command line               launcher  the server, the clients and the trainer ranks, and their end
trainer    a rank: update, look, update   rows      for benchmark/results/soak.json
clients    who asks it to generate        weights   version k of the weights, which anybody can compute
standing   which version is due           footprint what a process holds
seen       what trainer rank 0 wrote down expected  what the engine should hold and say, without this package
verdict    what counts as passed

Always on the CPU: what is watched here is memory of processes, and a host without a GPU shows all of it.
"""
