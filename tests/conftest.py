"""One thread and the products that training uses for every test, whichever came before."""

import torch

from lab import machine, products

machine.prepare()
torch.set_num_threads(1)
products.choose()
