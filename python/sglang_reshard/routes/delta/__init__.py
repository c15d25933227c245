"""Lossless deltas: a stream of messages, encoded as changes since the last update of the engine.

In: the messages of one link, as `p2p.links` packs them, and the same messages of the last update. Out: for each message
the encoding with the fewest bytes, and on the other side the elements that it overwrites in live memory.

Unit     an integer of 1, 2 or 4 bytes, as which elements are compared
Base     what the engine has: the messages of the last update; its checksum is its name
Section  one link's encoded messages, after a table of their kinds
"""
