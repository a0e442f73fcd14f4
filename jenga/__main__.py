"""`python -m jenga`: the command line, where its script is not on the path."""

import sys

from jenga.cli import main

sys.exit(main())
