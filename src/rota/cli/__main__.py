"""`python -m rota.cli` is `rota`."""

import sys

from rota.cli.main import main

sys.exit(main())
