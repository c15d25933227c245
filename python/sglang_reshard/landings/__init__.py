"""What is between a route and live memory: where weights arrive, and what is done before they are live.

shadow    memory beside the live weights, in which a staged update arrives
arrivals  memory for what is quantized or repacked once it has arrived whole
checked   compares what has arrived with what the trainer holds, before it counts
"""
