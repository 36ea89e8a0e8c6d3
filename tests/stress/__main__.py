"""Run lives of ranks that make random calls, and check every byte: `python -m tests.stress --minutes 10`."""

import argparse
import os
import random
import shutil
import sys
import tempfile
import time

from tests.harness import RankFailureError
from tests.stress.lives import KINDS, plan_of, run_life


def main() -> int:
    """Run the program; return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.stress", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0, help="how long to go on (1)")
    parser.add_argument("--ranks", type=int, default=4, help="the most ranks of a life, from 2 to 6 (4)")
    parser.add_argument("--seed", type=int, default=None, help="what the lives are derived from (chosen)")
    parser.add_argument("--life", type=int, default=None, help="run this life only")
    parser.add_argument("--kind", choices=sorted(set(KINDS)), default=None, help="run lives of one kind only")
    chosen = parser.parse_args()
    if not 2 <= chosen.ranks <= 6:
        parser.error("--ranks must be from 2 to 6")
    seed = random.SystemRandom().randrange(1 << 31) if chosen.seed is None else chosen.seed
    # It is short: Unix sockets in it have paths of at most 107 bytes.
    directory = tempfile.mkdtemp(prefix="gc-")
    tempfile.tempdir = os.environ["TMPDIR"] = directory
    until = time.monotonic() + 60 * chosen.minutes
    number, steps = chosen.life or 0, 0
    print(f"seed {seed}, up to {chosen.ranks} ranks, {chosen.minutes:g} min", flush=True)
    try:
        while chosen.life is not None or time.monotonic() < until:
            plan = plan_of(seed, number, chosen.ranks, chosen.kind)
            taken = run_life(plan)
            print(
                f"life {number}: {plan.kind}, {plan.ranks} ranks ({plan.places}), {taken} steps", flush=True
            )
            steps += taken
            number += 1
            if chosen.life is not None:
                break
    except (AssertionError, RankFailureError) as error:
        kind = f" --kind {chosen.kind!r}" if chosen.kind else ""
        notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
        print(f"{error}{notes}\n\nlife {number} failed. Run it again:", file=sys.stderr)
        print(
            f"  python -m tests.stress --seed {seed} --ranks {chosen.ranks} --life {number}{kind}",
            file=sys.stderr,
        )
        return 1
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    print(f"{number} lives, {steps} steps: every byte was right, and everybody blamed the right rank")
    return 0


if __name__ == "__main__":
    sys.exit(main())
