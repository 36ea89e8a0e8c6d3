"""Ray as it is: clusters of two hosts on this machine."""
