"""Load documents into a search index, in batches. No training here."""
import argparse
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import requests

LIMIT = 500


def chunks(rows, batch_size):
    for start in range(0, len(rows), batch_size):
        yield rows[start : start + batch_size]


def upload(url, rows):
    answer = requests.post(url, json={"documents": rows}, timeout=60)
    answer.raise_for_status()
    return len(rows)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("folder", type=Path)
    p.add_argument("--url", default="http://localhost:9200/_bulk")
    p.add_argument("--batch_size", type=int, default=200)
    p.add_argument("--num_workers", type=int, default=8)
    args = p.parse_args()
    batch_size = min(args.batch_size, LIMIT)
    num_workers = min(args.num_workers, 16)
    rows = [json.loads(path.read_text()) for path in sorted(args.folder.glob("*.json"))]
    with ThreadPoolExecutor(num_workers) as pool:
        done = sum(pool.map(lambda part: upload(args.url, part), chunks(rows, batch_size)))
    print(done, "documents")


if __name__ == "__main__":
    main()
