from __future__ import annotations
def take(job, variables, log, poll):
    pass
