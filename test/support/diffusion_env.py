"""What SGLang's diffusion engine imports, in a folder beside the project's packages: `make setup-diffusion`."""

from __future__ import annotations

from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / ".venv" / "diffusion"
needs_diffusion = pytest.mark.skipif(
    not FOLDER.exists(), reason="SGLang's diffusion engine has not all that it imports: make setup-diffusion"
)
