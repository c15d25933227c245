"""Provides what is built on senders and receivers. Nothing that an update without it runs imports it.

asynchronous      update_async: sends a copy of the weights while the trainer goes on
finite            first_not_finite: finds NaN and infinity in a trainer's weights
modules           ModuleSender, ModuleReceiver: updates plain torch modules in processes without SGLang
parameter_stream  ParameterStream: takes parameters that a trainer broadcasts, for one engine
probe             Probe: compares log-probabilities of trainer and engine after an update
realloc           reshard: moves weights between two layouts of one group of ranks
replicas          shares an engine's live weights with other engines
snapshots         Snapshots, SnapshotFollower: weights in a folder, written by trainer ranks and followed by engines
verl_engine       VerlEngine: starts and drives one engine from all trainer ranks
"""
