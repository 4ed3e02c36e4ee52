"""What the driver reads at the address of a launch description, as cuda.h lays it out on 64-bit machines."""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass


@dataclass(frozen=True)
class LaunchDescription:
    """``CUlaunchConfig``, with its attributes as (id, first word of the value)."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    stream: int
    attributes: tuple[tuple[int, int], ...]

    @classmethod
    def at(cls, address: int) -> LaunchDescription:
        """Read the one at ``address``: seven unsigned, a hole, two pointers, an unsigned."""
        memory = ctypes.string_at(address, 56)
        gx, gy, gz, bx, by, bz, shared_bytes, stream, attributes, count = struct.unpack("<7I4xQQI4x", memory)
        each = [struct.unpack("<i4xi", ctypes.string_at(attributes + 72 * i, 12)) for i in range(count)]
        return cls((gx, gy, gz), (bx, by, bz), shared_bytes, stream, tuple((name, value) for name, value in each))
