"""Tags separate the kinds of traffic between two ranks; the messages of one tag stay in order."""

from typing import Final

OBJECT_TAG: Final = 1
BROADCAST_TAG: Final = 2
TENSOR_TAG: Final = 3
GATHER_TAG: Final = 4
TENSOR_DICT_TAG: Final = 5
BROADCAST_TENSOR_TAG: Final = 6
SCATTER_TAG: Final = 7

# The tags of `send(..., tag=...)` start here; Gloo's own calls use lower ones.
FIRST_USER_TAG: Final = 0x10000
# Gloo's tags are signed 32-bit integers: tensors have this many of them, and objects half as many behind those.
MOST_TAGS: Final = 1 << 30
FIRST_OBJECT_TAG: Final = FIRST_USER_TAG + MOST_TAGS
MOST_OBJECT_TAGS: Final = MOST_TAGS // 2
