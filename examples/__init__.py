"""Programs that show the groups at work."""
