"""The layer between a route and live memory: where weights arrive, and their processing before they are live.

base        the interface; the base class is live memory itself
choice      the landings that an update needs
shadow      memory in addition to the live weights, where a staged update arrives
converting  quantizes or repacks complete weights
checked     compares the arrived weights with the trainer's, before they count
"""
