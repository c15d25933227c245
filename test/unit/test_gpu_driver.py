"""The driver's calls against cuda.h: attribute numbers, flags, argument types, and errors by name."""

import re
from pathlib import Path

import pytest
import torch

from sglang_reshard.gpu import driver
from sglang_reshard.gpu.driver import HANDLE_BYTES, CudaDriver, DriverError

NOT_SUPPORTED, INVALID_VALUE = 801, 1


class Libcuda:
    """One allocation at 0x7000; calls are recorded with plain values."""

    def __init__(self, has_handle=1, refuses_read_only=False, seen_at=None):
        self.calls = []
        self._attributes = {7: 99, 10: has_handle, 11: 0x7000, 12: 4096, 13: 1}
        self._refuses_read_only, self._seen_at = refuses_read_only, seen_at

    def cuPointerGetAttribute(self, value, attribute, address):
        if not 0x7000 <= address.value < 0x8000:
            return INVALID_VALUE
        value._obj.value = self._attributes[attribute]
        return 0

    def cuMemHostRegister_v2(self, address, nbytes, flags):
        self.calls.append(("register", address.value, nbytes.value, flags.value))
        return NOT_SUPPORTED if self._refuses_read_only and flags.value & 8 else 0

    def cuMemHostGetDevicePointer_v2(self, seen, address, flags):
        seen._obj.value = self._seen_at or address.value
        return 0

    def cuMemHostUnregister(self, address):
        self.calls.append(("unregister", address.value))
        return 0

    def cuGetErrorName(self, code, name):
        named = {NOT_SUPPORTED: b"CUDA_ERROR_NOT_SUPPORTED", INVALID_VALUE: b"CUDA_ERROR_INVALID_VALUE"}
        if code not in named:
            return INVALID_VALUE
        name._obj.value = named[code]
        return 0


@pytest.mark.parametrize("has_handle", [0, 1])
def test_memory_without_handles_is_told_though_it_is_mapped(has_handle):
    """Attribute 13, MAPPED, is 1 for all memory that can be read, expandable segments too."""
    assert CudaDriver(Libcuda(has_handle)).has_handle(0x7000) == bool(has_handle)


def test_host_memory_is_registered_for_reading_and_without_that_flag_where_devices_lack_it():
    portable, mapped, read_only = 1, 2, 8
    library = Libcuda()
    CudaDriver(library).register_host(0x1000, 8192)
    assert library.calls == [("register", 0x1000, 8192, portable | mapped | read_only)]
    library = Libcuda(refuses_read_only=True)
    CudaDriver(library).register_host(0x1000, 8192)
    assert library.calls[-1] == ("register", 0x1000, 8192, portable | mapped)


def test_host_memory_that_devices_see_elsewhere_is_not_registered():
    library = Libcuda(seen_at=0x5000)
    with pytest.raises(DriverError, match="another address"):
        CudaDriver(library).register_host(0x1000, 8192)
    assert library.calls[-1] == ("unregister", 0x1000)


def test_errors_have_the_drivers_names():
    with pytest.raises(DriverError, match=r"^cuPointerGetAttribute: CUDA_ERROR_INVALID_VALUE$") as caught:
        CudaDriver(Libcuda()).allocation(0x6000)
    assert caught.value.name == "CUDA_ERROR_INVALID_VALUE"
    library = Libcuda()
    library.cuIpcCloseMemHandle = lambda _: 12345
    with pytest.raises(DriverError, match="error 12345"):
        CudaDriver(library).close_handle(1)


def test_numbers_and_names_are_those_of_cuda_h():
    header = Path(torch.__file__).parents[1] / "nvidia" / "cu13" / "include" / "cuda.h"
    if not header.exists():
        pytest.skip("no cuda.h of torch's CUDA is installed")
    text = header.read_text()

    def number(name):
        found = re.search(rf"\b{name}\s*=?\s*(0x[0-9a-fA-F]+|\d+)", text)
        return int(found.group(1), 0)

    for name, own in {
        "CU_POINTER_ATTRIBUTE_BUFFER_ID": driver._BUFFER_ID,
        "CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE": driver._IPC_CAPABLE,
        "CU_POINTER_ATTRIBUTE_RANGE_START_ADDR": driver._RANGE_START,
        "CU_POINTER_ATTRIBUTE_RANGE_SIZE": driver._RANGE_SIZE,
        "CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS": driver._LAZY_PEER_ACCESS,
        "CU_MEMHOSTREGISTER_PORTABLE": driver._PORTABLE,
        "CU_MEMHOSTREGISTER_DEVICEMAP": driver._DEVICEMAP,
        "CU_MEMHOSTREGISTER_READ_ONLY": driver._READ_ONLY,
        "CU_IPC_HANDLE_SIZE": HANDLE_BYTES,
    }.items():
        assert own == number(name), name
    for call in ("cuIpcOpenMemHandle", "cuMemHostRegister", "cuMemHostGetDevicePointer"):
        assert re.search(rf"#define {call}\s+{call}_v2\b", text), call
    for call in ("cuPointerGetAttribute", "cuIpcGetMemHandle", "cuIpcCloseMemHandle", "cuMemHostUnregister"):
        assert not re.search(rf"#define {call}\s", text), call
