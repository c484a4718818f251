"""The config audit: files of Transformers, TRL, accelerate, DeepSpeed, axolotl and LLaMA-Factory, alone and against each other."""
