"""`python tests/benchmarks [objectives | training]`: what `python -m book bench` starts.

Every measuring process runs this file again, under another name: it must cost nothing then.
"""

import sys

if __name__ == "__main__":
    from importlib import import_module

    SCRIPTS = {"objectives": "objective_costs", "training": "training_costs"}
    part, *rest = sys.argv[1:] or ["both"]
    if part in SCRIPTS:
        sys.exit(import_module(SCRIPTS[part]).main(rest))
    if part != "both":
        rest = sys.argv[1:]
        if unknown := [word for word in rest if word not in ("--quick", "-h", "--help")]:
            print(
                f"python -m book bench: found {unknown[0]!r}; wanted objectives or training before "
                "it (each has its own options, see objectives --help), or --quick alone",
                file=sys.stderr,
            )
            sys.exit(2)
    worst = 0
    for script in SCRIPTS.values():
        status = import_module(script).main(rest)
        if status in (2, 130):
            sys.exit(status)
        worst = max(worst, status)
    sys.exit(worst)
