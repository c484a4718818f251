"""What to train: models and their catalogue, the words of the recipe, the workload and its configurations."""
