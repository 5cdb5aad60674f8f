"""`python -m fuzz`. The campaign has a module of its own, which its processes can import."""

import sys

from fuzz.campaign import main

if __name__ == "__main__":
    sys.exit(main())
