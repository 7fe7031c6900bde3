from __future__ import annotations

from hypothesis import settings

# Time limits per example make tests fail on a loaded machine; nothing here asserts wall time.
settings.register_profile("moesim", deadline=None)
settings.load_profile("moesim")
