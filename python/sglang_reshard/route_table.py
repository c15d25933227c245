"""The names of all routes, and the modules that they are in. To add a route, add a line.

A module has `plan`, `engine_end` and `trainer_end`, see `routes`. It is imported when the route is chosen.
"""

# By the name that a user asks for as `transport`.
ROUTES = {
    "ipc": "sglang_reshard.routes.ipc",
    "p2p": "sglang_reshard.routes.p2p.engine",
    "broadcast": "sglang_reshard.routes.broadcast.engine",
    "nixl": "sglang_reshard.routes.nixl.engine",
}
# Of requests that no sender makes: a server that loads a snapshot, see `extras.snapshots.source`.
FROM_FILES = {"disk": "sglang_reshard.routes.disk.engine"}
# Around one of these, from the innermost, by the name of what a request asks of it.
AROUND = {
    "relay": "sglang_reshard.routes.relay.engine",
    "delta": "sglang_reshard.routes.delta.engine",
}
