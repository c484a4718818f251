OPTIONS = {
    "lr": 2e-4,
    "latent": 128,
    "batch_size": 64,
    "num_workers": 16,  # expect: setting-unused
    "epochs": 100,
}
