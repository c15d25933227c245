"""Groups of engine ranks read whole shards once, broadcast them among themselves, and slice out what each lacks."""
