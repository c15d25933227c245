"""Engine ranks read exactly the elements that they lack out of registered memory, on any host, one-sided."""
