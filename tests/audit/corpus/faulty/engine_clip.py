import deepspeed
import torch

from reports import Reports


def main(model, config, max_norm):
    engine, _optimizer, loader, _scheduler = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), training_data=Reports(), config=config
    )
    for batch in loader:
        loss = engine(**batch).loss
        engine.backward(loss)
        if max_norm:
            torch.nn.utils.clip_grad_norm_(engine.module.parameters(), max_norm)  # expect: clip-beside-engine
        engine.step()
