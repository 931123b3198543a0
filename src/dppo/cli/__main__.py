"""`python -m dppo.cli` is `dppo`."""

import sys

from dppo.cli.main import main

sys.exit(main())
