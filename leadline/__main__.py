"""``python -m leadline``."""

import sys

from leadline.cli import main

if __name__ == "__main__":  # the engine process imports this module anew
    sys.exit(main())
