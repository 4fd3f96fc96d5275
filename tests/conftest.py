"""One thread for every test: the same bits on every machine, and no thread that waits for another."""

import torch

torch.set_num_threads(1)
