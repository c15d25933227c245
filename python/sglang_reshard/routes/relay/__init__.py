"""Engines that are updated together pass on to each other what one of them has read from the trainer."""
