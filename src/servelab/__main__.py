"""`python -m servelab` is the command line."""

import sys

from servelab.cli import main

sys.exit(main())
