"""Defines what trainer ranks and engine ranks send to each other, and where they leave it for each other.

messages        requests, commands and results, and their encoding
validation      checks of their content, before it is used
session         the key-value server of trainer rank 0, as one process uses it
update_channel  commands, statuses and votes of one update
publication     the order of a trainer's updates and snapshots
server_client   this package's endpoints of a server, over HTTP
weights_info    the response of `GET /weights_info`
"""
