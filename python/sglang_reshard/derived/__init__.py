"""Finds what a model derives from its weights, and has the model's own code compute it again after an update.

In: a model that `remember_loaded` was called with once it had been loaded. `DerivedState` finds what has appeared since
in anything that the model reaches, drops what its code makes again, or makes it again in place.
"""

from sglang_reshard.derived.derived_state import DerivedState
from sglang_reshard.derived.loaded_state import remember_loaded

__all__ = ["DerivedState", "remember_loaded"]
