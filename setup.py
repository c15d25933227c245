"""The package list cannot be found by scanning one folder, so it is made here; all else is in pyproject.toml."""

from setuptools import find_packages, setup

ROOTS = {"": "python", "sglang_reshard.patches": "patches", "sglang_reshard.verl": "verl_integration"}


def packages() -> list[str]:
    found = find_packages(ROOTS[""])
    for name, folder in ROOTS.items():
        if name:
            found += [name, *(f"{name}.{sub}" for sub in find_packages(folder))]
    return found


# The stand-in is found by path, not imported as part of this package, so it ships as data.
DATA = ["py.typed", "**/*.json", "testing/cpu_host/stand_in/sgl_kernel/*.py"]

setup(packages=packages(), package_data={"sglang_reshard": DATA})
