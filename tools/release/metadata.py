"""What two wheels say of themselves, as one: their METADATA, entry points and version.

Lines of stock's that need no change stay as they are, down to the byte.
"""

from __future__ import annotations

import configparser
import io
import re
from collections.abc import Iterable
from email.message import Message
from email.parser import HeaderParser

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

STOCK, PLUGIN = "sglang", "sglang-reshard"


class CannotMerge(Exception):
    """The two wheels contradict each other; the message says in what."""


def merged(stock: str, plugin: str, version: str, needs: Iterable[str], license_file: str) -> str:
    """Stock's METADATA with the plugin's requirements and extras, and `needs`, which are requirements besides.

    version: of the fork. license_file: where the plugin's license lies in the folder for licenses.
    Raises CannotMerge if the plugin asks for another SGLang or another Python than this is.
    """
    head, blank, description = stock.partition("\n\n")
    theirs, ours = _parsed(stock), _parsed(plugin)
    if theirs["Requires-Python"] != ours["Requires-Python"]:
        raise CannotMerge(f"{STOCK} is for Python {theirs['Requires-Python']}, {PLUGIN} for {ours['Requires-Python']}")
    lines = [*_requirements(ours, Version(theirs["Version"])), *(f"Requires-Dist: {need}" for need in needs)]
    present = set(head.splitlines())
    added = [f"License-File: {license_file}", f"Provides-Dist: {PLUGIN} ({ours['Version']})"]
    added += [line for line in lines if line not in present]
    head = _once(rf"(?m)^Version: {re.escape(theirs['Version'])}$", f"Version: {version}", head, "METADATA")
    return "\n".join([head, *added]) + blank + description


def merged_entry_points(stock: str, plugin: str) -> str:
    """Both wheels' entry_points.txt. Raises CannotMerge if they give one name two meanings."""
    both = _entry_points(stock)
    for group, entries in _entry_points(plugin).items():
        for name, value in entries.items():
            if both.setdefault(group, {}).setdefault(name, value) != value:
                raise CannotMerge(f"the entry point {name} of [{group}] is {both[group][name]} and {value}")
    text = io.StringIO()
    parser = _parser()
    parser.read_dict(both)
    parser.write(text)
    return text.getvalue().rstrip("\n") + "\n"


def with_version(module: str, stock: str, fork: str, notice: str) -> str:
    """The text of `sglang/_version.py` with the fork's version, and the notice that the license asks for."""
    release, local = Version(fork).release, Version(fork).local
    module = _once(rf"(?<=version = )'{re.escape(stock)}'$", f"'{fork}'", module, "_version.py")
    old, new = str(Version(stock).release), str((*release, local))
    return f"# {notice}\n" + _once(rf"(?<=version_tuple = ){re.escape(old)}$", new, module, "_version.py")


def _requirements(plugin: Message, stock: Version) -> list[str]:
    """The plugin's lines on extras and requirements. What it asks of SGLang is met, and SGLang provides its extras."""
    lines = []
    for text in plugin.get_all("Requires-Dist", []):
        requirement = Requirement(text)
        if canonicalize_name(requirement.name) == PLUGIN:
            requirement.name, requirement.specifier = STOCK, SpecifierSet()
            lines.append(f"Requires-Dist: {requirement}")
        elif canonicalize_name(requirement.name) != STOCK:
            lines.append(f"Requires-Dist: {text}")
        elif stock not in requirement.specifier:
            raise CannotMerge(f"{PLUGIN} asks for {text}, and this is {STOCK} {stock}")
        elif requirement.extras:
            raise CannotMerge(f"{PLUGIN} asks for {text}; an extra of {STOCK} cannot be asked for from within")
    return [f"Provides-Extra: {extra}" for extra in plugin.get_all("Provides-Extra", [])] + lines


def _once(pattern: str, replacement: str, text: str, where: str) -> str:
    text, count = re.subn(pattern, replacement, text, flags=re.MULTILINE)
    if count != 1:
        raise CannotMerge(f"{count} places in {STOCK}'s {where} look like its version, not one; has its form changed?")
    return text


def _parsed(metadata: str) -> Message:
    return HeaderParser().parsestr(metadata)


def _parser() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(delimiters=("=",), interpolation=None)
    parser.optionxform = str  # type: ignore[method-assign,assignment]  # names keep their case
    return parser


def _entry_points(text: str) -> dict[str, dict[str, str]]:
    parser = _parser()
    parser.read_string(text)
    return {group: dict(parser[group]) for group in parser.sections()}
