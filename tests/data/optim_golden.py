#!/usr/bin/env python3
"""Writes optim_golden.txt: what torch.optim does in 200 steps with random gradients.

    ATEN_CPU_CAPABILITY=default python3 tests/data/optim_golden.py > tests/data/optim_golden.txt

The default capability is torch's code without fused multiply-add, whose bits do not depend on the CPU.
Start values and gradients come from splitmix64 and are exact in f32 (k / 2^20), so that the reader makes the same.
"""
import os
import sys

os.environ["ATEN_CPU_CAPABILITY"] = "default"
import torch  # noqa: E402  (reads the variable when loaded)

ELEMENTS, STEPS, EVERY = 8, 200, 20
CASES = [
    ("sgd lr=0.05", torch.optim.SGD, dict(lr=0.05)),
    ("sgd lr=0.05 wd=0.01", torch.optim.SGD, dict(lr=0.05, weight_decay=0.01)),
    ("sgd lr=0.03 momentum=0.9", torch.optim.SGD, dict(lr=0.03, momentum=0.9)),
    ("sgd lr=0.03 momentum=0.9 dampening=0.3 wd=0.01", torch.optim.SGD,
     dict(lr=0.03, momentum=0.9, dampening=0.3, weight_decay=0.01)),
    ("sgd lr=0.03 momentum=0.8 nesterov=1 wd=0.02", torch.optim.SGD,
     dict(lr=0.03, momentum=0.8, nesterov=True, weight_decay=0.02)),
    ("adagrad", torch.optim.Adagrad, dict()),
    ("adagrad lr=0.1 lr_decay=0.01 wd=0.01 initial_accumulator=0.25", torch.optim.Adagrad,
     dict(lr=0.1, lr_decay=0.01, weight_decay=0.01, initial_accumulator_value=0.25)),
    ("rmsprop", torch.optim.RMSprop, dict()),
    ("rmsprop lr=0.02 alpha=0.95 eps=1e-6 wd=0.01", torch.optim.RMSprop,
     dict(lr=0.02, alpha=0.95, eps=1e-6, weight_decay=0.01)),
    ("rmsprop lr=0.02 momentum=0.9", torch.optim.RMSprop, dict(lr=0.02, momentum=0.9)),
    ("adam", torch.optim.Adam, dict()),
    ("adam lr=0.02 betas=0.8,0.99 wd=0.01 eps=1e-6", torch.optim.Adam,
     dict(lr=0.02, betas=(0.8, 0.99), weight_decay=0.01, eps=1e-6)),
    ("adamw", torch.optim.AdamW, dict()),
    ("adamw lr=0.02 betas=0.8,0.99 wd=0.1", torch.optim.AdamW, dict(lr=0.02, betas=(0.8, 0.99), weight_decay=0.1)),
]
MASK = (1 << 64) - 1


class Random:
    def __init__(self, seed):
        self.state = seed

    def next(self):
        self.state = (self.state + 0x9E3779B97F4A7C15) & MASK
        x = self.state
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
        return x ^ (x >> 31)

    def vector(self, dtype):
        return torch.tensor([(self.next() % (1 << 21) - (1 << 20)) / (1 << 20) for _ in range(ELEMENTS)], dtype=dtype)


def run(name, text, make, options, dtype):
    random = Random(1)
    p = torch.nn.Parameter(random.vector(dtype))
    optimizer = make([p], **options)
    print(f"case {name} {text}")
    for step in range(1, STEPS + 1):
        p.grad = random.vector(dtype)
        optimizer.step()
        if step == 1 or step % EVERY == 0:
            print(step, *(x.hex() for x in p.tolist()))


def main():
    print("# Made by tests/data/optim_golden.py; do not edit.")
    print(f"# torch {torch.__version__}, CPU, single tensor, ATEN_CPU_CAPABILITY=default (no fused multiply-add).")
    print(f"# Start values and gradients: splitmix64 from seed 1, (x % 2^21 - 2^20) / 2^20, {ELEMENTS} elements.")
    print("# \"case DTYPE OPTIMIZER\", then \"STEP VALUES\" in hexadecimal, exact.")
    for text, make, options in CASES:
        run("f32", text, make, options, torch.float32)
        run("f64", text, make, options, torch.float64)


if __name__ == "__main__":
    sys.exit(main())
