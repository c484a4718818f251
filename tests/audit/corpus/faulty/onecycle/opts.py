import argparse


def get_parser():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--accum", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--max-lr", type=float, default=1e-3)
    parser.add_argument("--workers", type=int, default=4)
    return parser
