"""Process groups over which the messages of routes travel: of gloo and of NCCL, and their common part.

Every wait in them ends at a deadline, and another thread can end it (`communicator`).
"""
