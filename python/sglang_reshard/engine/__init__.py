"""Executes updates on one engine rank: traces the loader, plans, transfers, verifies and commits the weights.

receiver         WeightReceiver: the running update, its session, and the reaction to a failure
update           UpdateExecutor: the phases of an update
context          UpdateContext: the state of one update, and the votes of the engine ranks to proceed
targets          Target: what is written; TargetPlan: its traced loader, and its reads from each trainer rank
prepared         Transfers: the transfer that is kept between updates, which has the route's end
trainer_memory   TrainerMemory: mapped memory of trainer ranks
trainer_presence TrainerPresence: whether the trainer of an update is there, asked before the engine stops serving
"""
