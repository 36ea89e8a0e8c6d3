"""What `python -m coordinator top` shows: samples of the pages, rows made of them, and how these look."""
