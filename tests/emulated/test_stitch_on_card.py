"""`brim stitch` and `brim verify` on a machine with an emulated card, and a stitched model that trains on it."""

from __future__ import annotations

from tests.emulated.conftest import RunOnCard
from tests.emulated.snippets import RUN_BRIM, TINY_TRAINING


def test_stitch_and_verify_do_not_use_the_card_and_a_stitched_model_trains_on_it(on_card: RunOnCard) -> None:
    """The commands run their proofs on the CPU. A module on the card is verified there, with computed values, also after training with autocast."""
    done = on_card(
        TINY_TRAINING
        + RUN_BRIM
        + """
import threading, torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from brim.machine import nvml
from brim.stitching.rows import Pad

tokenizer = AutoTokenizer.from_pretrained(folder)
vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
LlamaForCausalLM(LlamaConfig(
    vocab_size=vocabulary, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    tie_word_embeddings=False,
)).save_pretrained("other")
Path("recipe.yaml").write_text('''
donors: {first: ./tiny, second: ./other}
layers:
  - {donor: first, layers: 0-1}
  - {donor: second, layers: 1, adapter: linear}
train: [adapters, head]
''')
pids, is_over = set(), threading.Event()
def poll():
    while not is_over.wait(0.02):
        pids.update(process.pid for process in nvml.processes(0))
polling = threading.Thread(target=poll)
polling.start()
stitched = run_brim("stitch", "recipe.yaml", "-o", "stitched", "--json")
verified = run_brim("verify", "tiny", "--precision", "amp-bf16", "--json")
is_over.set()
polling.join()

class Rows:
    rows = [tokenizer(json.loads(line)["response"])["input_ids"][:64] for line in lines[:32]]
    def __len__(self): return len(self.rows)
    def __getitem__(self, index): return {"input_ids": self.rows[index], "labels": self.rows[index]}

stitched_model = brim.StitchLLM("stitched", Rows(), tokenizer)
trainable = {name for name, parameter in stitched_model.model.named_parameters() if parameter.requires_grad}
before = {name: parameter.detach().clone() for name, parameter in stitched_model.model.named_parameters()}
stitched_model.train("out", learning_rate=1e-2, per_device_train_batch_size=8, max_steps=4, save_steps=2, logging_steps=1, report_to="none",
                     disable_tqdm=True, eval_dataset=Rows(), eval_strategy="steps", eval_steps=4)
changed = {name for name, parameter in stitched_model.model.named_parameters() if not torch.equal(parameter.cpu(), before[name])}
ledger = [json.loads(line) for line in open("out/ledger.jsonl")]
plain = LlamaForCausalLM.from_pretrained("other")
trainer = Trainer(plain, TrainingArguments("plain", max_steps=1, fp16=True, report_to="none", disable_tqdm=True), train_dataset=Rows(),
                  data_collator=Pad(0))
for _ in range(2):
    trainer.train()
resumed = brim.StitchLLM("out", Rows(), tokenizer, verify=False)
resumed.train("out", learning_rate=1e-2, per_device_train_batch_size=8, max_steps=5, report_to="none", disable_tqdm=True, resume_from_checkpoint=True)
result = {
    "stitched": stitched, "verified": verified, "pids_on_card": sorted(pids), "device": str(stitched_model.model.device), "fp16": stitched_model.trainer.args.fp16,
    "trainable": sorted(trainable), "changed": sorted(changed), "losses": [line["loss"] for line in ledger if line["kind"] == "step"],
    "sequences": [len(line["sequence_ids"]) for line in ledger if line["kind"] == "step"], "resumed": resumed.trainer.state.global_step,
    "proofs": [[proof.verdict for proof in brim.verify(model).proofs] for model in (stitched_model.model, plain)],
    "evaluated": [entry["eval_loss"] for entry in stitched_model.trainer.state.log_history if "eval_loss" in entry],
}
""",
        memory="2GiB",
        compute=True,
    )
    result = done.result
    assert result["stitched"]["code"] == 0, result["stitched"]["stderr"]
    assert result["verified"]["code"] == 0, result["verified"]["stderr"]
    assert result["pids_on_card"] == []
    assert (result["device"], result["fp16"]) == ("cuda:0", True)
    assert result["changed"] == result["trainable"]
    assert result["sequences"] == [32] * 4
    assert result["losses"] == sorted(result["losses"], reverse=True)
    assert 0 < result["evaluated"][0] < result["losses"][0]
    assert result["resumed"] == 5
    assert result["proofs"] == [["pass"] * 5] * 2
