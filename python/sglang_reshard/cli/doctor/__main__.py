"""The doctor where typer, which the command line needs, is missing: python -m sglang_reshard.cli.doctor."""

from __future__ import annotations

import argparse
import sys

from sglang_reshard.cli.doctor import examine
from sglang_reshard.cli.doctor.finding import show
from sglang_reshard.cli.doctor.imports import SIDES

parser = argparse.ArgumentParser(prog="python -m sglang_reshard.cli.doctor", description=__doc__)
parser.add_argument("--side", choices=SIDES, help="what this environment is for; otherwise its packages tell")
parser.add_argument("--json", action="store_true")
arguments = parser.parse_args()
sys.exit(show(examine(side=arguments.side), json=arguments.json))
