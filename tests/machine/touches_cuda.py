"""A module that initialises CUDA when it is imported, as far as torch's check for forks can tell."""

from __future__ import annotations

import os

import torch

IMPORTED_BY = os.getpid()

torch.cuda._is_in_bad_fork = lambda: os.getpid() != IMPORTED_BY
