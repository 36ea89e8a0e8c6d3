"""Tags separate the kinds of traffic between two ranks; the messages of one tag stay in order."""

from typing import Final

OBJECT_TAG: Final = 1
BROADCAST_TAG: Final = 2
TENSOR_TAG: Final = 3
GATHER_TAG: Final = 4
TENSOR_DICT_TAG: Final = 5
BROADCAST_TENSOR_TAG: Final = 6
SCATTER_TAG: Final = 7
ALL_GATHER_TAG: Final = 8
GATHER_OBJECTS_TAG: Final = 9
DICT_TENSOR_TAG: Final = 10

# The tags of `send(..., tag=...)` start here; lower ones are for our own messages and for Gloo's internal calls.
FIRST_USER_TAG: Final = 0x10000
# Gloo's tags are signed 32-bit integers. Tensors have this many user tags; objects have half as many, numbered next.
TENSOR_TAG_COUNT: Final = 1 << 30
FIRST_OBJECT_TAG: Final = FIRST_USER_TAG + TENSOR_TAG_COUNT
OBJECT_TAG_COUNT: Final = TENSOR_TAG_COUNT // 2
