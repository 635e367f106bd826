"""The process of an input_fn under the worker's own interpreter."""

import sys

from workers.child.process import main

if __name__ == "__main__":
    sys.exit(main())
