class HParams:
    """Everything that can be changed from the command line."""

    def __init__(self, **overrides):
        self.batch_size = 24
        self.target_batch = 100
        self.num_workers = 6
        self.sample_rate = 16000
        self.lr = 4e-4
        self.max_epochs = 200
        for key, value in overrides.items():
            setattr(self, key, value)

    @property
    def valid_batch_size(self):
        return 4 * self.batch_size  # expect: eval-batch-tied

    @property
    def accumulate(self):
        return self.target_batch // self.batch_size  # expect: accumulation-floored
