"""Reads the names, shapes and dtypes of a checkpoint's tensors from the headers of its safetensors; no weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from sglang_reshard.errors import Mismatch, Unsupported
from sglang_reshard.layout.regions import ITEM_BYTES, TensorSpec

INDEX = "model.safetensors.index.json"
_CONSOLIDATED = "consolidated.safetensors"  # Mistral's own format, which some folders have as well
DTYPES = {  # safetensors' names -> torch's
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu", "I64": "int64", "I32": "int32", "I16": "int16",
    "I8": "int8", "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip


def folder_specs(folder: Path) -> list[TensorSpec]:
    """Returns the tensors of a folder's checkpoint, in the order of its files. Files that its index omits do not count.

    Raises Mismatch if there are no safetensors, or fewer than the index lists, and Unsupported for a dtype that cannot
    be moved.
    """
    files, listed = sorted(folder.glob("*.safetensors")), set[str]()
    if (folder / INDEX).is_file():
        weight_map: dict[str, str] = json.loads((folder / INDEX).read_text()).get("weight_map", {})
        listed, wanted = set(weight_map), set(weight_map.values())
        files = [file for file in files if file.name in wanted]
        if missing := sorted(wanted - {file.name for file in files}):
            raise Mismatch(f"{folder} has no {missing[0]}, which its {INDEX} lists")
    elif len(files) > 1:
        files = [file for file in files if file.name != _CONSOLIDATED]
    if not files:
        raise Mismatch(f"{folder} has no safetensors files")
    specs = [spec for file in files for spec in file_specs(file)]
    if missing := sorted(listed - {spec.name for spec in specs}):
        raise Mismatch(f"{folder} has no tensor {missing[0]}, which its {INDEX} lists")
    return specs


def file_specs(file: Path) -> Iterator[TensorSpec]:
    """Yields the tensors of one file.

    Raises Mismatch for a file that is not whole, and Unsupported for a dtype that cannot be moved.
    """
    from safetensors import SafetensorError, safe_open

    try:
        opening = safe_open(file, framework="pt")
    except SafetensorError as error:
        raise Mismatch(f"{file} is not a complete safetensors file: {error}") from error
    with opening as opened:
        for name in opened.keys():  # noqa: SIM118 (it is no dict)
            of = opened.get_slice(name)
            dtype = DTYPES.get(of.get_dtype())
            if dtype not in ITEM_BYTES:
                raise Unsupported(f"{file.name}: {name} has the dtype {of.get_dtype()}, which is not supported")
            yield TensorSpec(name, tuple(of.get_shape()), dtype)
