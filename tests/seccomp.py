"""Make the kernel refuse system calls, as container engines and sandboxes do with a seccomp filter."""

import ctypes
import platform
import struct

__all__ = ["NUMBERS", "refuse_calls"]

# The numbers of the calls differ between x86-64 and aarch64 only where the call is older than Linux 5.1.
NUMBERS = {
    "memfd_create": 279 if platform.machine() == "aarch64" else 319,
    "pidfd_open": 434,
    "futex_waitv": 449,
}
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 22, 38, 2
LOAD_WORD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06  # instructions of BPF
ALLOW, FAIL_WITH = 0x7FFF0000, 0x00050000  # verdicts of a filter


def refuse_calls(name: str, number: int) -> None:
    """Let the system call `name` fail with errno `number` in this thread and in threads that it starts, for ever."""
    program = b"".join(
        struct.pack("HBBI", *instruction)
        for instruction in (
            (LOAD_WORD, 0, 0, 0),  # the number of the call is the first word of what a filter sees
            (JUMP_IF_EQUAL, 0, 1, NUMBERS[name]),
            (RETURN, 0, 0, FAIL_WITH | number),
            (RETURN, 0, 0, ALLOW),
        )
    )
    code = ctypes.create_string_buffer(program)

    class Filter(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_void_p))

    libc = ctypes.CDLL(None, use_errno=True)
    given = Filter(len(program) // 8, ctypes.addressof(code))
    for arguments in (
        (PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        (PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(given)),
    ):
        if libc.prctl(*arguments) != 0:
            raise OSError(ctypes.get_errno(), "prctl refuses a seccomp filter")
