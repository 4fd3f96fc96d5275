"""One thread for every test: the same bits on every machine, and no thread that waits for another."""

import torch

from lab import machine

machine.prepare()
torch.set_num_threads(1)
