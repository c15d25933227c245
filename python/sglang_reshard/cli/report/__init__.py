"""Draws the report of an update: an HTML page, and a trace for Perfetto."""
