"""Every causal model of the catalogue, verified on a shrunk copy, in one process: is there a false alarm, and how long does it take?

    python benchmarks/verify_catalogue.py [--attention all]

Bar: under 3 minutes in total on two cores, and no failure.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter

import brim


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--attention", default=None)
    parser.add_argument("--precision", default="fp32")
    options = parser.parse_args()
    began = time.monotonic()
    verdicts: Counter[str] = Counter()
    names = [card.name for card in brim.models() if card.task == "causal-lm"]
    for name in names:
        found = brim.verify(name, attention=options.attention, precision=options.precision)
        verdicts.update(proof.verdict for proof in found.proofs)
        words = ", ".join(f"{proof.name} {proof.verdict}" for proof in found.proofs if proof.verdict != "pass")
        worst = max(proof.value or 0.0 for proof in found.proofs)
        print(f"{name:32} {found.seconds:5.2f} s  worst {worst:.1e}  {words or 'all pass'}", flush=True)
        for proof in found.failures():
            print(f"    {proof.name} ({proof.attention}): {proof.diagnosis}")
    print(f"{len(names)} models, {dict(verdicts)}, {time.monotonic() - began:.1f} s")


if __name__ == "__main__":
    main()
