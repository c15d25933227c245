"""Builds what is released: the plugin's wheel, and the forked wheel, which is stock SGLang's and the plugin's in one.

Run from the repository; not installed. `make wheel`, `make fork` and `make test-fork` are the ways in.

    archive.py      wheels as entries: read and verified, written so that the same entries are the same bytes
    plain.py        the plugin's wheel, built from the checkout
    stock.py        the pinned stock wheel, from the package index or from before; its digest is in sha256.txt
    metadata.py     what two wheels say of themselves, as one
    fork.py         the forked wheel
    environment.py  an environment of the lock with the forked wheel in the place of SGLang's
"""

from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
DIST = REPOSITORY / "dist"
