"""Executes updates on one engine rank: traces the loader, plans, transfers, verifies and commits the weights.

receiver         WeightReceiver: which update is under way in which session, and what happens when it fails
update           UpdateExecutor: the phases of an update
context          UpdateContext: the state of one update, and the votes by which engine ranks go on together
target_planning  TargetPlan: the traced loader, and what it reads from which trainer rank
prepared         Transfers: the transfer that is kept between updates, which has the route's end
trainer_memory   TrainerMemory: mapped memory of trainer ranks
"""
