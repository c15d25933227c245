"""`sglang_reshard.verl`, the adapter that makes this a rollout backend of verl: its place, not written yet."""
