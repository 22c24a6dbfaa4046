"""`python tests/benchmarks`: what `python -m book bench` starts.

Every measuring process runs this file again, under another name: it must cost nothing then.
"""

import sys

if __name__ == "__main__":
    from objective_costs import main

    sys.exit(main())
