"""The middle layer: collectives on tensors behind one contract, whatever the device."""
