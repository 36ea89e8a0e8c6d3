"""What torch does not offer for Gloo."""
