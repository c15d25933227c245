"""The version of this package; both sides of an update must have the same."""

__version__ = "0.1.0"
