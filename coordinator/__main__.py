"""`python -m coordinator`: what a user runs before writing any code, and pastes into a bug report."""

from coordinator.cli import main

raise SystemExit(main())
