"""For all tests."""

from hypothesis import settings

# How long one example takes says nothing here: machines are shared, and the first one imports torch.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")
