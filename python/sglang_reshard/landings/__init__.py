"""Memory in which weights arrive before they are live: shadow weights, and what is converted on arrival."""
