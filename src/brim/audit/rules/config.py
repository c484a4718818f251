"""Rules about configs: products that disagree, words that nobody fills in, settings that cancel, and cards that cannot do it."""

from __future__ import annotations

from brim.audit.rules.rule import Rule
from brim.locale import N_

_DEEPSPEED = "https://www.deepspeed.ai/docs/config-json/"
_TRAINER_DEEPSPEED = "https://huggingface.co/docs/transformers/deepspeed"
_ACCELERATE_DEEPSPEED = "https://huggingface.co/docs/accelerate/usage_guides/deepspeed"
_ARGUMENTS = "https://huggingface.co/docs/transformers/main_classes/trainer#transformers.TrainingArguments"
_AXOLOTL = "https://docs.axolotl.ai/docs/config-reference.html"

RULES: tuple[Rule, ...] = (
    Rule(
        name="config-product",
        group="config",
        severity="medium",
        also=N_("High if the tool trains with another batch than the file names."),
        title=N_("The batch sizes of a config do not multiply"),
        why=N_(
            "A step holds micro-batch x accumulation x processes, and the config also names the result. If all three are given, DeepSpeed "
            "compares them and stops before the first step, often after a long wait for the machine. If one is missing it divides and "
            "rounds down. axolotl rounds down too and does not stop: it trains with another batch than the file names. A factor of 0 or "
            "below, or a number in quotes, stops all of them."
        ),
        mend=N_("Give two of the three and let the tool compute the third, or correct the product for the number of processes."),
        sources=(_DEEPSPEED, _AXOLOTL),
        example_name="ds_config.json",
        bad="""\
{
  "train_batch_size": 100,
  "train_micro_batch_size_per_gpu": 8,
  "gradient_accumulation_steps": 4,
  "bf16": {"enabled": true},
  "zero_optimization": {"stage": 2}
}
""",
        good="""\
{
  "train_batch_size": 128,
  "train_micro_batch_size_per_gpu": 8,
  "gradient_accumulation_steps": 4,
  "bf16": {"enabled": true},
  "zero_optimization": {"stage": 2}
}
""",
    ),
    Rule(
        name="config-pair-disagrees",
        group="config",
        severity="medium",
        also=N_(
            "High if both files are used together and one value silently replaces the other; low if the files only lie in one folder."
        ),
        title=N_("Two configs that are used together disagree"),
        why=N_(
            "The Trainer's arguments, accelerate's file and DeepSpeed's file each have a key for accumulation, clipping, precision and the "
            "learning rate. The Trainer stops if its values differ from DeepSpeed's. accelerate stops if its file repeats a key of "
            "DeepSpeed's file. Of two precisions, the Trainer's and accelerate's, one silently replaces the other."
        ),
        mend=N_(
            "Set each value in one place. In a DeepSpeed file that the Trainer reads, write auto for what the arguments already set."
        ),
        sources=(_TRAINER_DEEPSPEED, _ACCELERATE_DEEPSPEED),
        bad="""\
# file: train.yaml
output_dir: outputs
per_device_train_batch_size: 4
gradient_accumulation_steps: 16
learning_rate: 2.0e-5
max_grad_norm: 1.0
bf16: true
deepspeed: ds.json
# file: ds.json
{
  "train_micro_batch_size_per_gpu": 4,
  "gradient_accumulation_steps": 1,
  "bf16": {"enabled": true},
  "zero_optimization": {"stage": 2}
}
""",
        good="""\
# file: train.yaml
output_dir: outputs
per_device_train_batch_size: 4
gradient_accumulation_steps: 16
learning_rate: 2.0e-5
max_grad_norm: 1.0
bf16: true
deepspeed: ds.json
# file: ds.json
{
  "train_micro_batch_size_per_gpu": "auto",
  "gradient_accumulation_steps": "auto",
  "bf16": {"enabled": "auto"},
  "zero_optimization": {"stage": 2}
}
""",
    ),
    Rule(
        name="config-auto-open",
        group="config",
        severity="medium",
        title=N_("A field says auto, and nobody fills it in"),
        why=N_(
            "The word auto in a DeepSpeed config is an agreement with the Hugging Face Trainer, which fills in a fixed list of "
            "fields; accelerate fills in fewer. In any other field DeepSpeed drops the key and takes its own default, or passes "
            "the word on to code that expects a number. Without the Trainer the batch sizes themselves stay open, and the run "
            "stops at them."
        ),
        mend=N_("Write the value, or leave the key out if the default is meant."),
        sources=(_TRAINER_DEEPSPEED, _DEEPSPEED),
        example_name="ds_config.json",
        bad="""\
{
  "train_batch_size": "auto",
  "train_micro_batch_size_per_gpu": "auto",
  "gradient_accumulation_steps": "auto",
  "zero_optimization": {
    "stage": 3,
    "reduce_bucket_size": "auto",
    "stage3_max_live_parameters": "auto"
  }
}
""",
        good="""\
{
  "train_batch_size": "auto",
  "train_micro_batch_size_per_gpu": "auto",
  "gradient_accumulation_steps": "auto",
  "zero_optimization": {
    "stage": 3,
    "reduce_bucket_size": "auto",
    "stage3_max_live_parameters": 1e9
  }
}
""",
    ),
    Rule(
        name="config-cancels",
        group="config",
        severity="medium",
        title=N_("Two settings of a config exclude each other"),
        why=N_(
            "Some settings switch others off, and some pairs are rejected. A repeated key keeps its last value, and auto_find_batch_size "
            "changes the effective batch after an out-of-memory error. YAML reads 1e-4, without a point, as text. A rejected pair stops "
            "the run, at worst after a long wait for the machine. Pairs without an effect on the training (max_steps with epochs, "
            "eval_steps without evaluation) are not reported."
        ),
        mend=N_("Keep the setting that you mean and remove the other."),
        sources=(_ARGUMENTS, "https://github.com/huggingface/transformers/pull/33281"),
        example_name="train.yaml",
        bad="""\
output_dir: outputs
per_device_train_batch_size: 8
gradient_accumulation_steps: 4
auto_find_batch_size: true
learning_rate: 2.0e-5
save_strategy: steps
save_steps: 250
eval_strategy: steps
eval_steps: 100
load_best_model_at_end: true
""",
        good="""\
output_dir: outputs
per_device_train_batch_size: 8
gradient_accumulation_steps: 4
learning_rate: 2.0e-5
save_strategy: steps
save_steps: 200
eval_strategy: steps
eval_steps: 100
load_best_model_at_end: true
""",
    ),
    Rule(
        name="config-gpu-cannot",
        group="config",
        severity="high",
        title=N_("The config asks for what the card cannot do"),
        why=N_(
            "bfloat16 and TF32 came with NVIDIA's Ampere generation, FlashAttention 2 needs the same, and fp8 needs Ada or "
            "Hopper. On an older card the run stops when the model is loaded, or bfloat16 is emulated at a fraction of the "
            "speed. A config that was written for a rented A100 meets this on the first T4."
        ),
        mend=N_("Take fp16 for bf16, sdpa for FlashAttention 2, and leave tf32 and fp8 out; or name a newer card."),
        sources=(
            "https://huggingface.co/docs/transformers/perf_train_gpu_one",
            "https://github.com/Dao-AILab/flash-attention",
            "https://developer.nvidia.com/cuda-gpus",
        ),
        example_name="train.yaml",
        bad="""\
# gpu: t4
output_dir: outputs
per_device_train_batch_size: 8
gradient_accumulation_steps: 4
learning_rate: 2.0e-5
bf16: true
tf32: true
""",
        good="""\
# gpu: t4
output_dir: outputs
per_device_train_batch_size: 8
gradient_accumulation_steps: 4
learning_rate: 2.0e-5
fp16: true
""",
    ),
    Rule(
        name="config-over-memory",
        group="config",
        severity="high",
        title=N_("The config needs more memory than the card has"),
        why=N_(
            "brim predicts the memory of one step from the model and the settings, without running it. Here that is more than "
            "the card has, so the run ends with an out-of-memory error: at once, or hours later when the longest sequences come "
            "together. The effective batch is a promise, and the micro-batch only decides how it is sliced."
        ),
        mend=N_("Lower the micro-batch and raise accumulation by the same factor; `brim plan` finds the fastest cut that fits."),
        sources=("https://huggingface.co/docs/transformers/model_memory_anatomy", "https://arxiv.org/abs/2510.21048"),
        example_name="train.yaml",
        bad="""\
# gpu: t4
model_name_or_path: gpt2
stage: sft
do_train: true
finetuning_type: full
cutoff_len: 512
output_dir: outputs
disable_gradient_checkpointing: true
per_device_train_batch_size: 64
gradient_accumulation_steps: 1
learning_rate: 2.0e-5
fp16: true
""",
        good="""\
# gpu: t4
model_name_or_path: gpt2
stage: sft
do_train: true
finetuning_type: full
cutoff_len: 512
output_dir: outputs
disable_gradient_checkpointing: true
per_device_train_batch_size: 8
gradient_accumulation_steps: 8
learning_rate: 2.0e-5
fp16: true
""",
    ),
    Rule(
        name="config-under-used",
        group="config",
        severity="medium",
        title=N_("The config leaves much of the card unused"),
        why=N_(
            "The predicted memory is below 70 percent of the card, while each step is cut into several micro-batches. A larger "
            "micro-batch with less accumulation makes the same step, and fills the card's arithmetic better: fewer, larger "
            "kernels."
        ),
        mend=N_(
            "Raise the micro-batch and lower accumulation by the same factor, so that the effective batch stays; `brim probe` "
            "measures it."
        ),
        sources=(
            "https://huggingface.co/docs/transformers/perf_train_gpu_one",
            "https://docs.nvidia.com/deeplearning/performance/dl-performance-fully-connected/index.html",
        ),
        example_name="train.yaml",
        bad="""\
# gpu: t4
model_name_or_path: gpt2
stage: sft
do_train: true
finetuning_type: full
cutoff_len: 512
output_dir: outputs
disable_gradient_checkpointing: true
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 2.0e-5
fp16: true
""",
        good="""\
# gpu: t4
model_name_or_path: gpt2
stage: sft
do_train: true
finetuning_type: full
cutoff_len: 512
output_dir: outputs
disable_gradient_checkpointing: true
per_device_train_batch_size: 8
gradient_accumulation_steps: 1
learning_rate: 2.0e-5
fp16: true
""",
    ),
    Rule(
        name="config-dead-key",
        group="config",
        severity="high",
        also=N_(
            "Medium if the tool stops at the key, if the key is misspelt, or if the project pins no version of the tool. Low if the value "
            "is the default or does not change the training."
        ),
        title=N_("A key of the config that nothing reads"),
        why=N_(
            "Keys are renamed and removed from release to release, and a misspelt key is another key. The doctor compares them with the "
            "versions that the project pins; without a pin it assumes the newest release. A key that the project's own code reads is not "
            "reported, nor is one without a value. DeepSpeed and axolotl skip unknown keys, so the default is used; other tools stop."
        ),
        mend=N_("Use the name that the tool has in this version."),
        sources=(
            "https://raw.githubusercontent.com/huggingface/transformers/v5.15.0/src/transformers/training_args.py",
            "https://github.com/huggingface/transformers/pull/41326",
            _DEEPSPEED,
        ),
        example_name="train.yaml",
        bad="""\
output_dir: outputs
per_gpu_train_batch_size: 32
gradient_acumulation_steps: 4
learning_rate: 2.0e-5
evaluation_strategy: epoch
""",
        good="""\
output_dir: outputs
per_device_train_batch_size: 32
gradient_accumulation_steps: 4
learning_rate: 2.0e-5
eval_strategy: epoch
""",
    ),
)
