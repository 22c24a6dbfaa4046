"""Does a GPU compute what the CPU does, and how fast? `python -m book gpu-check`.

Checks and measurements of `gpu_pieces`, one after the other; a table on the screen as it comes, and
the same with command, versions, device and commit in `build/gpu-check/<device>.json`, written after
each piece. --record writes it to `chapters/runs/gpu-check.json` too. Under 5 minutes on a GPU.
Exit status: 0; 1 where a check failed; 2 without a GPU, unless --device cpu is given, which runs
the same smaller; 130 after an interrupt.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # a machine with a GPU may have the source alone

from gpu_pieces import PIECES, Plan, Row, small, toy  # noqa: E402

from rlcore.training.processes import Processes  # noqa: E402
from rlcore.training.record import replace_text, surroundings  # noqa: E402

OUTPUT = ROOT / "build" / "gpu-check"
RECORD = ROOT / "chapters" / "runs" / "gpu-check.json"


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print(
            "gpu-check: torch sees no CUDA device here; --device cpu runs the same on the CPU, "
            "smaller",
            file=sys.stderr,
        )
        return 2
    device = torch.device(options.device)
    plan = Plan(device) if device.type == "cuda" else small(device)
    if options.toy:
        plan = toy(device)
    if options.pretrained is not None:
        plan = replace(plan, pretrained=options.pretrained)
    command = " ".join(["python -m book gpu-check", *(arguments or sys.argv[1:])])
    found: dict[str, Any] = {
        **surroundings(Processes(device=device)),
        "command": command,
        "began": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": {},
        "rows": [],
    }
    name = re.sub(r"[^a-z0-9]+", "-", found["device"].lower()).strip("-")
    targets = [OUTPUT / f"{name}.json", *([RECORD] if options.record else [])]
    print(f"{found['device']}, torch {torch.__version__}", flush=True)
    status = 0
    for piece in options.only or PIECES:
        began = time.monotonic()
        try:
            for row in PIECES[piece](plan):
                found["rows"].append(asdict(row))
                print(line(row), flush=True)
                status = 1 if row.ok is False else status
        except KeyboardInterrupt:
            status = 130
        except Exception as error:  # the other pieces may still say something
            row = Row(piece, "stopped", f"{type(error).__name__}: {error}", ok=False)
            found["rows"].append(asdict(row))
            print(line(row), flush=True)
            status = 1
        found["seconds"][piece] = round(time.monotonic() - began, 1)
        for target in targets:
            target.parent.mkdir(parents=True, exist_ok=True)
            replace_text(target, json.dumps(found, indent=1) + "\n")
        if status == 130:
            return status
    failed = sum(row["ok"] is False for row in found["rows"])
    print(f"{failed} checks failed; {sum(found['seconds'].values()):.0f} s; {targets[0]}")
    return status


def line(row: Row) -> str:
    """A row for the screen."""
    mark = {None: "    ", True: "ok  ", False: "FAIL"}[row.ok]
    value = row.value if isinstance(row.value, str) else f"{row.value:.4g}"
    tail = f"  (wanted {row.wanted})" if row.wanted else ""
    return f"{mark} {row.piece:<13} {row.what:<70} {value} {row.unit}{tail}".rstrip()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m book gpu-check", description=__doc__)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--only", action="append", choices=PIECES, help="this piece alone")
    parser.add_argument("--pretrained", metavar="MODEL", help="(default: smollm2-135m)")
    parser.add_argument("--record", action="store_true", help="into chapters/runs as well")
    parser.add_argument("--toy", action="store_true", help="as small as can be, for tests")
    return parser


if __name__ == "__main__":
    sys.exit(main())
