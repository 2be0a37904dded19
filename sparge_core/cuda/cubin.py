"""Reads from a cubin (an ELF file) what the host must agree with: the size of a kernel's parameters."""

from __future__ import annotations

import struct

_SECTION_HEADER = struct.Struct("<IIQQQQIIQQ")
_INFO_PREFIX = ".nv.info."
_FORMAT_WITH_PAYLOAD = 4  # EIFMT_SVAL: the 16-bit field counts the bytes that follow
# EIATTR_KPARAM_INFO: index, ordinal, offset, and the size in the upper 14 bits of the last word.
_KPARAM_INFO = 0x17
_KPARAM = struct.Struct("<IHHI")
_KPARAM_SIZE_SHIFT = 18


def parameter_bytes(cubin: bytes) -> dict[str, int]:
    """Kernel name -> bytes of its only parameter; empty for anything that is not a cubin (PTX, say)."""
    if cubin[:5] != b"\x7fELF\x02":
        return {}
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    entry_size, count, names_index = struct.unpack_from("<HHH", cubin, 0x3A)
    sections = [_SECTION_HEADER.unpack_from(cubin, table + i * entry_size) for i in range(count)]
    names_offset = sections[names_index][4]
    found = {}
    for name_offset, _, _, _, offset, size, *_ in sections:
        start = names_offset + name_offset
        name = cubin[start : cubin.index(b"\0", start)].decode()
        if name.startswith(_INFO_PREFIX):
            found[name.removeprefix(_INFO_PREFIX)] = _parameter_size(cubin[offset : offset + size])
    return found


def _parameter_size(info: bytes) -> int:
    position = 0
    while position + 4 <= len(info):
        kind, attribute, value = struct.unpack_from("<BBH", info, position)
        position += 4
        if attribute == _KPARAM_INFO:
            return _KPARAM.unpack_from(info, position)[3] >> _KPARAM_SIZE_SHIFT
        position += value if kind == _FORMAT_WITH_PAYLOAD else 0
    return 0  # a kernel without parameters
