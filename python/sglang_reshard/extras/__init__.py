"""Provides what is built on the senders, by their public names.

snapshots  Snapshots: writes a sender's weights to a folder, always or where its engine is out of reach
"""
