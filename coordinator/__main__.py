"""`python -m coordinator`: inspect an installation and try it before writing any code."""

from coordinator.cli import main

raise SystemExit(main())
