"""How large a batch, for 7b, 13b and 30b models on 8, 16, 24 and 40 GB, as the memory model predicts.

Look at the zeros: there not even one sequence fits, and a line below the table says what would. The number is a micro-batch of QLoRA
training that divides 32 and 64 exactly. At the end stands all that was assumed, because three words leave much open. `brim plan` takes your
own model, data and card.
"""

import argparse
import warnings

import brim

MEMORY_GB = (8, 16, 24, 40)


def main(words: list[str] | None = None) -> dict[tuple[str, int], int]:
    """Print the table, and return the micro-batch of each model and memory."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--models", default="7b,13b,30b", help="sizes, with commas: of 1b, 3b, 7b, 13b, 30b, 70b")
    options.add_argument("--task", default="generation", help="generation, qa or classification")
    choice = options.parse_args(words)

    found: dict[tuple[str, int], int] = {}
    assumed: dict[str, None] = {}
    reasons: dict[str, None] = {}
    print("model  memory  micro-batch  in use    one more  accumulation for 32   for 64")
    for model in choice.models.split(","):
        for memory_gb in MEMORY_GB:
            with warnings.catch_warnings(action="ignore"):  # the reason is printed below
                answer = brim.recommend_batch_size(model, memory_gb, choice.task)
            found[model, memory_gb] = answer["recommended_batch_size"]
            if not answer["fits"]:
                reasons[f"{model} on {memory_gb} GB: {answer['reason']}"] = None
            assumed.update(dict.fromkeys(answer["assumptions"]))
            accumulations = (answer["gradient_accumulation_for_32"] or "-", answer["gradient_accumulation_for_64"] or "-")
            print(
                f"{model:5} {memory_gb:4} GB  {answer['recommended_batch_size']:11} {answer['estimated_memory_usage']:5.1f} GB"
                f"  {answer['memory_per_sample']:6.2f} GB  {accumulations[0]:>19}  {accumulations[1]:>7}"
            )
    print("", *reasons, sep="\n")
    print("\nAssumed", *assumed, sep="\n  ")
    return found


if __name__ == "__main__":
    main()
