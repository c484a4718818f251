"""One way to end, and few words: what a script may do to whoever watches it."""

# mypy: ignore-errors

import os
import signal
import sys
import time
import warnings


def trained():
    import torch
    from parts import Tiny, loss_of, rows

    model = Tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = rows(4)
    for _step in range(3):
        loss_of(model(batch), batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, batch


def main():
    how = sys.argv[1]
    print("to stdout", flush=True)
    print("to stderr", file=sys.stderr)
    if how == "three":
        sys.exit(3)
    if how == "text":
        sys.exit("a last word")
    if how == "killed":
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)
    if how == "crash":
        model, batch = trained()

        class Wrong(type(model)):
            def forward(self, input_ids):
                warnings.warn("seen from the caller", stacklevel=4)
                raise ValueError("no such row")

        wrong = Wrong()
        import torch

        torch.optim.SGD(wrong.parameters(), lr=0.1)
        wrong(batch)
    if how == "closes":
        os.closerange(3, 200)
        mine = os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT, 0o644)
        trained()
        os.write(mine, b"mine")
    if how == "removes":
        import shutil

        shutil.rmtree(sys.argv[2])
        os.close(os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT, 0o644))
        trained()
        sys.exit(7)
    if how == "sides":
        import torch

        model, batch = trained()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _step in range(5):
            (model(batch).sum() - model(batch.clone()).sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
    if how == "interrupted":
        model, batch = trained()
        print("trained", flush=True)
        while True:
            model(batch)
            time.sleep(0.05)
    if how == "loader":
        import torch
        from torch.utils.data import DataLoader

        model, batch = trained()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for row in DataLoader(list(batch), batch_size=2, num_workers=2, multiprocessing_context=sys.argv[2]):
            model(row).sum().backward()
            optimizer.step()


if __name__ == "__main__":
    main()
