"""Which addresses a name stands for, and at which one the others reach this process."""
