"""Executes updates on trainer ranks: publishes shards, sends them to engine ranks that cannot read them, reports the
result.

update_sender  UpdateSender: one rank's end of a session, which takes part in updates
options        SenderOptions and UpdateOptions: what users choose
publisher    ShardPublisher: layout and memory handles of one rank's shards, published when they change
worker       TrainerWorker: the commands of engine rank 0, on every trainer rank; EngineTransfers: to one engine
coordinator  UpdateCoordinator: the single request to the engine, on trainer rank 0
collectives  typed messages over the trainer ranks' own process group; Gathering: what all say, or the first failure
"""
