"""Provides what users call: the senders of trainer ranks, and clients of engines.

weight_sender  WeightSender: updates one engine from all trainer ranks
multi_engine   MultiEngineSender: updates several engines at once
remote_engine  RemoteEngine: calls a server over HTTP, without torch
"""
