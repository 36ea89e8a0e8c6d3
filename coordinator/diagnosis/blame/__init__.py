"""Find who is at fault where ranks hang or have died: from live pages, or from what a run has recorded."""
