"""Executes updates on one engine rank: traces the loader, plans, transfers, verifies and commits the weights.

receiver        WeightReceiver: which update is under way in which session, and what happens when it fails
update          UpdateExecutor: the phases of an update
context         UpdateContext: the state of one update, and the votes by which engine ranks go on together
transfer        what is kept between updates: the traced loader, mapped memory, communicators, the transport
shadow_weights  memory in which staged updates arrive
"""
