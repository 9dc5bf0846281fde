"""`python -m stages COMMAND`, in a checkout: what `shardwright COMMAND` is."""

import sys

from shardwright.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
