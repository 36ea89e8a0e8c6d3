"""Tags keep the kinds of traffic between two ranks apart; each kind is in order by itself."""

from typing import Final

OBJECT_TAG: Final = 1
BROADCAST_TAG: Final = 2
TENSOR_TAG: Final = 3
GATHER_TAG: Final = 4
TENSOR_DICT_TAG: Final = 5
BROADCAST_TENSOR_TAG: Final = 6
SCATTER_TAG: Final = 7

# Those of `send(..., tag=...)` follow behind this one; Gloo's own calls take tags below it.
FIRST_USER_TAG: Final = 0x10000
