"""The memory that a call of our CUDA kernels needs, by the layout in DESIGN.md."""

from typing import Final

from device_comm.cuda.kernel_layout import _PARAMS, KERNEL_NAMES, LINE_BYTES, VECTOR_BYTES

__all__ = ["ALGORITHMS", "PARAMS_BYTES", "required_arena", "required_staging"]

# The kernels that communicate with peers and therefore use a workspace.
ALGORITHMS: Final = KERNEL_NAMES[1:17]
PARAMS_BYTES: Final = _PARAMS.size


def required_arena(kernel: str, nbytes: int, world_size: int) -> int:
    """Return the bytes of the arena of one phase, a multiple of 128; 0 for a pull and a multimem kernel.

    `nbytes` are those of the input; of the output for push_reduce_scatter, of one rank's part for push_all_gather.
    """
    vectors = max(1, -(-nbytes // VECTOR_BYTES))
    slots = {
        "push_one_shot": world_size * vectors,
        "push_add_rms_norm": world_size * vectors,
        "push_moe_finalize": world_size * vectors,
        # One row.
        "push_two_shot_add_rms_norm": world_size * 32 * -(-vectors // (32 * world_size)) + vectors,
        "push_reduce_scatter": world_size * vectors,
        "push_two_shot": 2 * world_size * -(-vectors // world_size),
        "push_all_gather": world_size * max(1, -(-nbytes // 8)),
        "pull_one_shot": 0,
        "pull_two_shot": 0,
        "multimem_one_shot": 0,
        "multimem_two_shot": 0,
        "staged_all_gather": 0,
    }
    return _lines(slots[kernel.removesuffix("_fp8").removesuffix("_nvfp4")] * VECTOR_BYTES)


def required_staging(nbytes: int) -> int:
    """Return the smallest staging area with which a pull of `nbytes` is allowed."""
    return _lines(nbytes)


def _lines(nbytes: int) -> int:
    return -(-nbytes // LINE_BYTES) * LINE_BYTES
