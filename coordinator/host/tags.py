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
