"""Embedding service: requests are gathered into batches."""
import asyncio
import os

import torch
from fastapi import FastAPI
from pydantic import BaseModel
from transformers import AutoModel, AutoTokenizer

MAX_BATCH = int(os.environ.get("MAX_BATCH", "32"))
WAIT_SECONDS = 0.01
app = FastAPI()
queue: asyncio.Queue = asyncio.Queue()
tokenizer = AutoTokenizer.from_pretrained("intfloat/e5-small-v2")
model = AutoModel.from_pretrained("intfloat/e5-small-v2").eval()


class Request(BaseModel):
    text: str
    batch_size: int = 16


@torch.inference_mode()
def embed(texts, batch_size):
    out = []
    for start in range(0, len(texts), batch_size):
        enc = tokenizer(texts[start : start + batch_size], padding=True, truncation=True, max_length=512, return_tensors="pt")
        out.extend(model(**enc).last_hidden_state[:, 0].tolist())
    return out


async def worker():
    while True:
        items = [await queue.get()]
        await asyncio.sleep(WAIT_SECONDS)
        while not queue.empty() and len(items) < MAX_BATCH:
            items.append(queue.get_nowait())
        batch_size = min(max(r.batch_size for r, _ in items), 64)
        vectors = await asyncio.to_thread(embed, [r.text for r, _ in items], batch_size)
        for (_, future), vector in zip(items, vectors):
            future.set_result(vector)


@app.on_event("startup")
async def start():
    app.state.worker = asyncio.create_task(worker())


@app.post("/embed")
async def handle(request: Request):
    future = asyncio.get_running_loop().create_future()
    await queue.put((request, future))
    return {"vector": await future}
