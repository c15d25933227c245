"""Provides what users call: the senders of trainer ranks, and clients of engines.

weight_sender     WeightSender: updates one engine from all trainer ranks
multi_engine      MultiEngineSender: updates several engines at once
verl_engine       VerlEngine: starts and drives one engine from all trainer ranks
parameter_stream  ParameterStream: takes parameters that a trainer broadcasts, for one engine
remote_engine     RemoteEngine: calls a server over HTTP, without torch
finite            first_not_finite: finds NaN and infinity in what a trainer is about to send
"""
