"""Keep kernels loaded and their arguments packed, so that a call rewrites three words and launches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from device_comm.cuda.driver import Driver, PreparedLaunch
from device_comm.cuda.kernels import FAMILIES, family_of

__all__ = ["CubinSource", "Launch", "Launches"]

CubinSource = Callable[[str, str], bytes]
"""(family of kernels, dtype) -> compiled module for the group's architecture and world size."""

_WORD: Final = b"\0" * 8
# Number of arguments, one word each, by the name of a local kernel. The collective kernels whose names end
# with that name take as many after `Params`. The norms take five addresses, then rows, hidden and eps (32
# bits each), and with an output of 8 or 4 bits two addresses of scales. A finalize takes five addresses and
# four numbers. All other kernels take three words.
_ARGUMENTS: Final = {"add_rms_norm": 8, "add_rms_norm_fp8": 10, "add_rms_norm_nvfp4": 10, "moe_finalize": 9}


class Launch:
    """One kernel for one dtype, ready to launch. Each call rewrites its last arguments.

    Attributes:
        function: The driver's handle of the kernel.
        arguments: Its packed arguments.
        words: The storage of the arguments, as 64-bit words.
        first: Index of the first argument that changes; the others follow it, one word each.
    """

    __slots__ = ("arguments", "first", "function", "words")

    def __init__(self, function: int, fixed: Sequence[bytes], changing: int) -> None:
        """Pack the arguments `fixed`, followed by `changing` words that calls rewrite."""
        self.function: int = function
        packed = list(fixed)
        self.arguments: PreparedLaunch = PreparedLaunch([*packed, *(_WORD,) * changing])
        self.words: memoryview[int] = self.arguments.words
        self.first: int = self.arguments.word_of[len(packed)]


class Launches:
    """The modules and launches of one group on one device. Modules are loaded at first use, never during capture."""

    def __init__(self, driver: Driver, cubin: CubinSource, params: bytes, area: bytes = b"") -> None:
        """Load nothing yet.

        Args:
            driver: The device.
            cubin: Returns compiled modules.
            params: The kernels' `Params`, as `pack_params` returns them.
            area: The `MulticastArea`, as `pack_area` returns it; empty without one.
        """
        self._driver = driver
        self._cubin = cubin
        self._params = params
        self._area = area
        self._modules: dict[tuple[str, str], int] = {}
        self._launches: dict[tuple[str, str], Launch] = {}

    def load(self, family: str, dtype: str) -> None:
        """Compile or read a module, load it, and pack the launches of its kernels. Not allowed during capture."""
        if (family, dtype) in self._modules:
            return
        module = self._driver.module_load(self._cubin(family, dtype))
        self._modules[family, dtype] = module
        for kernel in FAMILIES[family]:
            fixed = [] if kernel in _ARGUMENTS else [self._params]
            if family == "multimem":
                fixed.append(self._area)
            changing = next((count for name, count in _ARGUMENTS.items() if kernel.endswith(name)), 3)
            function = self._driver.module_function(module, kernel)
            self._launches[kernel, dtype] = Launch(function, fixed, changing)

    def get(self, kernel: str, dtype: str) -> Launch | None:
        """Return the launch of a kernel, or None if its module is not loaded."""
        return self._launches.get((kernel, dtype))

    def of(self, kernel: str, dtype: str) -> Launch:
        """Return the launch of a kernel; load its module if necessary."""
        found = self._launches.get((kernel, dtype))
        if found is None:
            self.load(family_of(kernel), dtype)
            found = self._launches[kernel, dtype]
        return found

    def unload(self) -> None:
        """Unload all modules. Idempotent."""
        self._launches.clear()
        while self._modules:
            self._driver.module_unload(self._modules.popitem()[1])
